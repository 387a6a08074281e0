#include "recovery/keeper/kept_copies.h"

#include <algorithm>
#include <utility>

namespace rekindle::keeper {

Result<void> KeptCopies::keep(const std::string& name, KeptCopy copy, TimePoint now) {
  if (name.empty() || copy.blocks.empty() || copies_.contains(name)) {
    return fail(ErrorCode::kInvalid, "keep a copy '{}' of {} blocks: {}", name, copy.blocks.size(),
                copies_.contains(name) ? "there is one of this name" : "that is no copy");
  }
  const auto has_room = [&copy](const Held& held, std::size_t share) {
    return held.copies < kMostCopies / share &&
           held.blocks + copy.blocks.size() <= kMostBlocks / share &&
           held.record_bytes + copy.record.size() <= kMostRecordBytes / share;
  };
  const Held all = held(std::nullopt);
  const Held own = held(copy.owner);
  const bool is_full = !has_room(all, 1);
  if (is_full || !has_room(own, kOwnersShare)) {
    const Held& most = is_full ? all : own;
    return fail(ErrorCode::kExhausted,
                "the keeper has {} copies{}, with {} blocks and {} bytes of records; there is no "
                "room for one with {} blocks and {} bytes",
                most.copies, is_full ? "" : fmt::format(" of user {}", copy.owner), most.blocks,
                most.record_bytes, copy.blocks.size(), copy.record.size());
  }
  copy.users.clear();
  copy.expires = now + copy.time_to_live;
  copies_.emplace(name, std::move(copy));
  return {};
}

Result<UserId> KeptCopies::add_user(const std::string& name) {
  const auto found = copies_.find(name);
  if (found == copies_.end()) {
    return fail(ErrorCode::kNotFound, "the keeper has no copy '{}'", name);
  }
  KeptCopy& copy = found->second;
  if (copy.users.size() >= kMostUsers) {
    return fail(ErrorCode::kExhausted, "{} processes use the copy '{}'; no more may",
                copy.users.size(), name);
  }
  const UserId user = ++last_user_;
  copy.users.insert(user);
  copy.expires.reset();
  users_[user] = name;
  return user;
}

std::optional<std::string> KeptCopies::remove_user(UserId user, TimePoint now) {
  const auto found = users_.find(user);
  if (found == users_.end()) return std::nullopt;
  std::string name = std::move(found->second);
  users_.erase(found);
  KeptCopy& copy = copies_.at(name);
  copy.users.erase(user);
  if (copy.users.empty()) copy.expires = now + copy.time_to_live;
  return name;
}

Result<void> KeptCopies::drop(const std::string& name) {
  const auto found = copies_.find(name);
  if (found == copies_.end()) {
    return fail(ErrorCode::kNotFound, "the keeper has no copy '{}'", name);
  }
  for (const UserId user : found->second.users) users_.erase(user);
  copies_.erase(found);
  return {};
}

KeptCopies::Held KeptCopies::held(std::optional<std::uint32_t> owner) const {
  Held held;
  for (const auto& [name, copy] : copies_) {
    if (owner && copy.owner != *owner) continue;
    ++held.copies;
    held.blocks += copy.blocks.size();
    held.record_bytes += copy.record.size();
  }
  return held;
}

const KeptCopy* KeptCopies::find(const std::string& name) const {
  const auto found = copies_.find(name);
  return found == copies_.end() ? nullptr : &found->second;
}

std::vector<std::string> KeptCopies::expire(TimePoint now) {
  std::vector<std::string> over;
  for (const auto& [name, copy] : copies_) {
    if (copy.expires && *copy.expires <= now) over.push_back(name);
  }
  for (const std::string& name : over) (void)drop(name);
  return over;
}

std::optional<TimePoint> KeptCopies::next_expiry() const {
  std::optional<TimePoint> next;
  for (const auto& [name, copy] : copies_) {
    if (copy.expires) next = std::min(next.value_or(*copy.expires), *copy.expires);
  }
  return next;
}

}  // namespace rekindle::keeper

#include "recovery/device/device_ledger.h"

#include <algorithm>
#include <utility>

namespace rekindle::device {

const DeviceLedger::Entry* DeviceLedger::find(std::uint64_t session) const {
  const auto found = entries_.find(session);
  return found == entries_.end() ? nullptr : &found->second;
}

void DeviceLedger::forget_if_done(std::uint64_t session) {
  const Entry* const entry = find(session);
  if (entry == nullptr || entry->open || entry->spread != Spread::kNone) return;
  if (entry->lent == nullptr) entries_.erase(session);
}

void DeviceLedger::begin(std::uint64_t session, std::shared_ptr<const void> lent) {
  Entry& entry = entries_[session];
  entry.open = true;
  entry.lent = std::move(lent);
}

bool DeviceLedger::is_open(std::uint64_t session) const {
  const Entry* const entry = find(session);
  return entry != nullptr && entry->open;
}

std::size_t DeviceLedger::open_sessions() const {
  return static_cast<std::size_t>(
      std::ranges::count_if(entries_, [](const auto& item) { return item.second.open; }));
}

bool DeviceLedger::end(std::uint64_t session) {
  if (!is_open(session)) return false;
  entries_[session].open = false;
  forget_if_done(session);
  return true;
}

bool DeviceLedger::over(std::uint64_t session, bool device_lost) {
  const auto found = entries_.find(session);
  if (found == entries_.end()) return false;
  if (!device_lost) found->second.lent.reset();
  const bool was_open = std::exchange(found->second.open, false);
  forget_if_done(session);
  return was_open;
}

void DeviceLedger::spread(std::uint64_t session) { entries_[session].spread = Spread::kOrdered; }

bool DeviceLedger::is_spreading(std::uint64_t session) const {
  const Entry* const entry = find(session);
  return entry != nullptr && entry->spread != Spread::kNone;
}

bool DeviceLedger::stop(std::uint64_t session, TimePoint now) {
  if (!is_open(session) && !is_spreading(session)) return false;
  Entry& entry = entries_[session];
  if (entry.spread == Spread::kOrdered) {
    entry.spread = Spread::kStopping;
    entry.stopped_at = now;
  }
  return true;
}

bool DeviceLedger::spread_over(std::uint64_t session) {
  if (!is_spreading(session)) return false;
  entries_[session].spread = Spread::kNone;
  forget_if_done(session);
  return true;
}

bool DeviceLedger::overdue(TimePoint now, std::chrono::milliseconds limit) const {
  return std::ranges::any_of(entries_, [&](const auto& item) {
    return item.second.spread == Spread::kStopping && now - item.second.stopped_at > limit;
  });
}

void DeviceLedger::excuse(TimePoint now) {
  for (auto& [session, entry] : entries_) entry.stopped_at = now;
}

DeviceLedger::Lost DeviceLedger::lose_all() {
  Lost lost;
  for (auto& [session, entry] : entries_) {
    if (std::exchange(entry.spread, Spread::kNone) != Spread::kNone) {
      lost.spreads.push_back(session);
    }
    if (std::exchange(entry.open, false)) lost.sessions.push_back(session);
  }
  std::erase_if(entries_, [](const auto& item) { return item.second.lent == nullptr; });
  lost.ids.assign(ids_.begin(), ids_.end());
  ids_.clear();
  return lost;
}

void DeviceLedger::reaped() {
  for (auto& [session, entry] : entries_) entry.lent.reset();
  std::erase_if(entries_, [](const auto& item) {
    return !item.second.open && item.second.spread == Spread::kNone;
  });
}

}  // namespace rekindle::device

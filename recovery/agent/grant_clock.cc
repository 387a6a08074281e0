#include "recovery/agent/grant_clock.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <string>
#include <string_view>

#include <fcntl.h>
#include <unistd.h>

#include "src/base/blake3.h"
#include "src/base/log.h"
#include "src/base/unique_fd.h"

namespace rekindle::agent {

namespace {

// A coordinator raises its epoch by this much at most. A hello may raise it by less, so that the
// coordinator that leads can still go above it.
constexpr std::uint64_t kMaxStep = std::uint64_t{1} << 32;
constexpr std::size_t kRaisesKept = 16;
constexpr std::string_view kPrefix = "rekindle-epoch ";
constexpr std::string_view kDigestMark = " blake3:";
constexpr std::size_t kDigestDigits = 16;

std::optional<std::uint64_t> number_in(std::string_view digits) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error == std::errc() && end == digits.data() + digits.size()) return value;
  return std::nullopt;
}

struct Kept {
  std::uint64_t highest = 0;
  std::uint64_t confirmed = 0;
};

std::string words_of(const Kept& kept) {
  if (kept.confirmed == kept.highest) return fmt::format("{}{}", kPrefix, kept.highest);
  return fmt::format("{}{} {}", kPrefix, kept.highest, kept.confirmed);
}

// "rekindle-epoch HIGHEST", then the last confirmed epoch where that is another one, then "
// blake3:" and the first digits of the digest of the text before it. Without the digest a changed
// digit would be another epoch.
std::string with_digest(const std::string& words) {
  const Digest digest = blake3(as_bytes(words));
  return fmt::format("{}{}{}\n", words, kDigestMark, digest.hex().substr(0, kDigestDigits));
}

// nullopt: the text is damaged. Earlier builds wrote it without the digest.
std::optional<Kept> parse(std::string_view text) {
  if (!text.starts_with(kPrefix) || !text.ends_with('\n')) return std::nullopt;
  std::string_view words = text.substr(0, text.size() - 1);
  if (const std::size_t mark = words.find(kDigestMark); mark != std::string_view::npos) {
    words = words.substr(0, mark);
    if (text != with_digest(std::string(words))) return std::nullopt;
  }
  const std::string_view numbers = words.substr(kPrefix.size());
  const std::size_t space = numbers.find(' ');
  const auto highest = number_in(numbers.substr(0, space));
  const auto confirmed =
      space == std::string_view::npos ? highest : number_in(numbers.substr(space + 1));
  if (!highest || !confirmed || *confirmed > *highest) return std::nullopt;
  return Kept{*highest, *confirmed};
}

Result<void> sync_directory(const std::filesystem::path& directory) {
  const UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) return fail_errno(errno, fmt::format("open {}", directory.string()));
  if (::fsync(fd.get()) != 0) return fail_errno(errno, fmt::format("fsync {}", directory.string()));
  return {};
}

constexpr std::size_t kIssuersKept = 8;
// The lifetime of a coordinator's grant (Timing::grant_ttl), and the largest difference between two
// readings of a clock.
constexpr std::chrono::milliseconds kGrantLifetime{60'000};
constexpr std::chrono::milliseconds kClockSlack{2'000};
// A coordinator that answers no heartbeat for so long is away.
constexpr std::chrono::milliseconds kContactGap{10'000};

}  // namespace

Result<void> HighestEpoch::keep_in(const std::filesystem::path& file, TimePoint now) {
  file_ = file;
  const UniqueFd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!fd) {
    if (errno == ENOENT) return highest_ == 0 ? Result<void>() : save();
    return fail_errno(errno, fmt::format("open {}", file.string()));
  }
  std::array<char, 128> buffer{};
  const ssize_t got = ::read(fd.get(), buffer.data(), buffer.size());
  if (got < 0) return fail_errno(errno, fmt::format("read {}", file.string()));
  const std::string_view text(buffer.data(), static_cast<std::size_t>(got));
  const auto kept = parse(text);
  if (!kept) return put_damaged_aside();
  confirmed_ = std::max(confirmed_, kept->confirmed);
  raise(kept->highest, now);
  // Written again when the agent has heard of more, or when an earlier build wrote the file.
  return text == with_digest(words_of({highest_, confirmed_})) ? Result<void>() : save();
}

// The agent goes on as with a new store and warns about it. An agent that does not start serves no
// copy, and deleting the file to make it start loses just as much.
Result<void> HighestEpoch::put_damaged_aside() const {
  const std::filesystem::path aside = file_.string() + ".damaged";
  if (::rename(file_.c_str(), aside.c_str()) != 0) {
    return fail_errno(errno, fmt::format("rename the damaged file {}", file_.string()));
  }
  log::warn("epoch.damaged", "file", file_.string(), "kept_as", aside.string(), "lost",
            "which coordinators were replaced: until this agent hears of the present epoch it "
            "follows one of any epoch",
            "action", "check the disk; end every replaced coordinator that still runs");
  return highest_ == 0 ? sync_directory(file_.parent_path()) : save();
}

std::optional<TimePoint> HighestEpoch::replaced_at(std::uint64_t epoch) const {
  for (const Raise& raise : raises_) {
    if (raise.to > epoch) return raise.at;
  }
  return std::nullopt;
}

void HighestEpoch::raise(std::uint64_t epoch, TimePoint now) {
  if (epoch <= highest_) return;
  highest_ = epoch;
  raises_.push_back({epoch, now});
  if (raises_.size() > kRaisesKept) raises_.pop_front();
}

void HighestEpoch::hear(std::uint64_t epoch, TimePoint now) {
  if (epoch <= highest_) return;
  if (epoch - confirmed_ >= kMaxStep) {
    log::warn("epoch.absurd", "epoch", epoch, "highest", highest_, "confirmed", confirmed_);
    return;
  }
  raise(epoch, now);
  keep();
}

void HighestEpoch::confirm(std::uint64_t epoch, TimePoint now) {
  if (epoch < highest_ || epoch == confirmed_) return;
  // An agent that was never registered has no measure: it takes the epoch of its first coordinator.
  if (confirmed_ != 0 && epoch - highest_ > kMaxStep) {
    log::warn("epoch.absurd", "epoch", epoch, "highest", highest_, "confirmed", confirmed_);
    return;
  }
  raise(epoch, now);
  confirmed_ = epoch;
  keep();
}

void HighestEpoch::keep() const {
  if (file_.empty()) return;
  // The epoch still holds until the agent ends.
  if (auto saved = save(); !saved) log::error("epoch.not_kept", "error", saved.error());
}

// Writes a new file, syncs it, renames it into place and syncs the directory.
Result<void> HighestEpoch::save() const {
  const std::string text = with_digest(words_of({highest_, confirmed_}));
  const std::filesystem::path aside = file_.string() + ".new";
  const UniqueFd fd(
      ::open(aside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) return fail_errno(errno, fmt::format("open {}", aside.string()));
  const ssize_t written = ::write(fd.get(), text.data(), text.size());
  if (written != static_cast<ssize_t>(text.size())) {
    return fail_errno(written < 0 ? errno : ENOSPC, fmt::format("write {}", aside.string()));
  }
  if (::fsync(fd.get()) != 0) return fail_errno(errno, fmt::format("fsync {}", aside.string()));
  if (::rename(aside.c_str(), file_.c_str()) != 0) {
    return fail_errno(errno, fmt::format("rename {}", aside.string()));
  }
  return sync_directory(file_.parent_path());
}

void GrantClock::observe(const Incarnation& issuer, std::string_view key, std::uint64_t issuer_ms,
                         TimePoint now) {
  const auto found = std::ranges::find(issuers_, issuer, &Issuer::id);
  if (found != issuers_.end()) {
    // A late reply would set the clock back, so the furthest reading counts.
    const auto elapsed = static_cast<std::uint64_t>(milliseconds(now - found->at));
    if (issuer_ms > found->issuer_ms + elapsed) {
      found->issuer_ms = issuer_ms;
      found->at = now;
    }
    return;
  }
  issuers_.push_back({issuer, std::string(key), issuer_ms, now});
  if (issuers_.size() > kIssuersKept) issuers_.pop_front();
}

void GrantClock::hear_coordinator(TimePoint now) {
  if (!in_contact_since(now)) contact_begin_ = now;
  contact_end_ = now;
}

std::optional<TimePoint> GrantClock::in_contact_since(TimePoint now) const {
  return now - contact_end_ > kContactGap ? std::nullopt : contact_begin_;
}

Result<const GrantClock::Issuer*> GrantClock::find(const Incarnation& id) const {
  const auto found = std::ranges::find(issuers_, id, &Issuer::id);
  if (found != issuers_.end()) return &*found;
  return fail(ErrorCode::kStale, "the grant's issuer is not known here: ask the coordinator again");
}

Result<std::string> GrantClock::key_of(const Incarnation& issuer) const {
  TRY(const Issuer* found, find(issuer));
  return found->key;
}

Result<TimePoint> GrantClock::check(const Incarnation& issuer, std::uint64_t epoch,
                                    std::uint64_t expiry_ms, TimePoint now) const {
  TRY(const Issuer* found, find(issuer));
  const auto elapsed = static_cast<std::uint64_t>(milliseconds(now - found->at));
  if (found->issuer_ms + elapsed > expiry_ms) {
    return fail(ErrorCode::kDenied, "the grant expired {} ms ago: ask for a new one",
                found->issuer_ms + elapsed - expiry_ms);
  }
  const auto left = std::chrono::milliseconds(
      std::min<std::uint64_t>(expiry_ms - found->issuer_ms - elapsed, 1u << 31));
  const auto replaced_at = epoch == 0 ? std::nullopt : epochs_.replaced_at(epoch);
  if (replaced_at && now + left > *replaced_at + kGrantLifetime + kClockSlack) {
    return fail(ErrorCode::kStale,
                "the grant is of epoch {}, whose coordinator was replaced before it was given "
                "(epoch {} now): ask the new one",
                epoch, epochs_.highest());
  }
  return now + left;
}

}  // namespace rekindle::agent

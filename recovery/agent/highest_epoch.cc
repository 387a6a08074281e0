#include "recovery/agent/highest_epoch.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <string>
#include <string_view>

#include <fcntl.h>
#include <unistd.h>

#include "src/base/log.h"
#include "src/base/unique_fd.h"

namespace rekindle::agent {

namespace {

// A coordinator raises its epoch by so much at most. A hello may raise by less: the coordinator
// that leads can still reign above it.
constexpr std::uint64_t kMaxStep = std::uint64_t{1} << 32;
constexpr std::size_t kRaisesKept = 16;
constexpr std::string_view kPrefix = "rekindle-epoch ";

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

// "rekindle-epoch HIGHEST", and the one that was confirmed last where that is another.
Result<Kept> parse(std::string_view text) {
  if (text.starts_with(kPrefix) && text.ends_with('\n')) {
    const std::string_view numbers = text.substr(kPrefix.size(), text.size() - kPrefix.size() - 1);
    const std::size_t space = numbers.find(' ');
    const auto highest = number_in(numbers.substr(0, space));
    const auto confirmed =
        space == std::string_view::npos ? highest : number_in(numbers.substr(space + 1));
    if (highest && confirmed && *confirmed <= *highest) return Kept{*highest, *confirmed};
  }
  return fail(ErrorCode::kCorrupt, "it is not an epoch");
}

Result<void> sync_directory(const std::filesystem::path& directory) {
  const UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) return fail_errno(errno, fmt::format("open {}", directory.string()));
  if (::fsync(fd.get()) != 0) return fail_errno(errno, fmt::format("fsync {}", directory.string()));
  return {};
}

}  // namespace

Result<void> HighestEpoch::keep_in(const std::filesystem::path& file, TimePoint now) {
  file_ = file;
  const UniqueFd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!fd) {
    if (errno == ENOENT) return highest_ == 0 ? Result<void>() : save();
    return fail_errno(errno, fmt::format("open {}", file.string()));
  }
  std::array<char, 64> text{};
  const ssize_t got = ::read(fd.get(), text.data(), text.size());
  if (got < 0) return fail_errno(errno, fmt::format("read {}", file.string()));
  const auto kept = parse({text.data(), static_cast<std::size_t>(got)});
  if (!kept) {
    return fail(ErrorCode::kCorrupt,
                "the file {} is damaged: {}; delete it to trust any coordinator again",
                file.string(), kept.error().message());
  }
  confirmed_ = std::max(confirmed_, kept->confirmed);
  raise(kept->highest, now);
  return {};
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
  // Who was never registered has no measure: it takes what its first coordinator says.
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
  // It still holds for this life.
  if (auto saved = save(); !saved) log::error("epoch.not_kept", "error", saved.error());
}

// Aside, fsync, rename, fsync the directory.
Result<void> HighestEpoch::save() const {
  const std::string text = confirmed_ == highest_
                               ? fmt::format("{}{}\n", kPrefix, highest_)
                               : fmt::format("{}{} {}\n", kPrefix, highest_, confirmed_);
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

}  // namespace rekindle::agent

#include "recovery/device/lingering.h"

#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

#include <fmt/format.h>

namespace rekindle::device {

namespace {

constexpr std::chrono::milliseconds kLook{200};
constexpr std::chrono::minutes kLongest{10};

// The one that it was opened by, wherever that was moved: a file that was linked into the store has
// others, which are none of our business.
bool has_its_name(const UniqueFd& file) {
  std::error_code error;
  const std::string path =
      std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", file.get()), error).string();
  return !error && !path.ends_with(" (deleted)");
}

}  // namespace

void Lingering::add(std::vector<Segment> segments, std::vector<UniqueFd> files, TimePoint now) {
  for (std::size_t i = 0; i < segments.size(); ++i) {
    all_.push_back({std::move(segments[i]), std::move(files[i]), now + kLongest});
  }
}

std::optional<TimePoint> Lingering::look(TimePoint now) {
  std::vector<Segment> over;
  std::erase_if(all_, [&](One& one) {
    const bool stays = one.segment.use_count() == 1 && now < one.until && has_its_name(one.file);
    if (!stays) over.push_back(std::move(one.segment));
    return !stays;
  });
  if (!over.empty()) let_go_(std::move(over));
  if (all_.empty()) return std::nullopt;
  return now + kLook;
}

}  // namespace rekindle::device

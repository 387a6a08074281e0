#include "recovery/device/lingering.h"

#include <utility>

#include <sys/stat.h>

namespace rekindle::device {

namespace {

constexpr std::chrono::milliseconds kLook{200};
constexpr std::chrono::minutes kLongest{10};

bool has_a_name(const UniqueFd& file) {
  struct stat status {};
  return ::fstat(file.get(), &status) == 0 && status.st_nlink > 0;
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
    const bool stays = one.segment.use_count() == 1 && now < one.until && has_a_name(one.file);
    if (!stays) over.push_back(std::move(one.segment));
    return !stays;
  });
  if (!over.empty()) let_go_(std::move(over));
  if (all_.empty()) return std::nullopt;
  return now + kLook;
}

}  // namespace rekindle::device

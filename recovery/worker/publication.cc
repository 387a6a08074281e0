#include "recovery/worker/publication.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <stdlib.h>

#include "src/base/units.h"

namespace rekindle::worker {

namespace {

constexpr std::uint64_t kMaxSegmentBytes = 5 * kGiB;

}  // namespace

Result<std::unique_ptr<Publication>> Publication::begin(store::SegmentStore& store,
                                                        const std::filesystem::path& parent,
                                                        ModelVersion id, const TensorSet& tensors) {
  std::vector<TensorBox> boxes;
  for (TensorIndex i = 0; i < tensors.size(); ++i) {
    boxes.push_back({i, Box::whole(tensors[i].shape)});
  }
  TRY(auto packed, pack_layout(tensors, boxes, kMaxSegmentBytes));
  if (::mkdir(parent.c_str(), 0700) != 0 && errno != EEXIST) {
    return fail_errno(errno, fmt::format("create {}", parent.string()));
  }
  std::string name = (parent / "XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) return fail_errno(errno, "create " + name);
  std::unique_ptr<Publication> publication(
      new Publication(store, std::move(id), tensors, std::move(packed), name));
  const auto segments = publication->packed_.layout.segments();
  const auto& headers = publication->packed_.headers;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    TRY(auto segment,
        store.create_segment(publication->directory_ / segments[i].name, segments[i].size_bytes));
    std::memcpy(segment->writable().data(), headers[i].data(), headers[i].size());
    publication->segments_.push_back(std::move(segment));
  }
  return publication;
}

Publication::~Publication() {
  for (const auto& segment : segments_) {
    if (segment->path().parent_path() != directory_) continue;  // taken over
    if (left_mapped_) store_.never_reuse(*segment);
    (void)store_.remove_segment(segment->path());
  }
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

Result<std::vector<UniqueFd>> Publication::open_segments() const {
  std::vector<UniqueFd> out;
  for (const auto& segment : packed_.layout.segments()) {
    const auto path = directory_ / segment.name;
    UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    if (!fd) return fail_errno(errno, fmt::format("open {}", path.string()));
    out.push_back(std::move(fd));
  }
  return out;
}

}  // namespace rekindle::worker

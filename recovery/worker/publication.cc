#include "recovery/worker/publication.h"

#include <cerrno>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <stdlib.h>

#include "src/base/units.h"

namespace rekindle::worker {

namespace {

constexpr std::uint64_t kMaxSegmentBytes = 5 * kGiB;

Result<void> write_segment(const std::filesystem::path& path, const std::string& header,
                           std::uint64_t size_bytes) {
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd) return fail_errno(errno, fmt::format("create {}", path.string()));
  const int error = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(size_bytes));
  if (error != 0) return fail_errno(error, fmt::format("allocate {} bytes", size_bytes));
  std::size_t done = 0;
  while (done < header.size()) {
    const auto put =
        ::pwrite(fd.get(), header.data() + done, header.size() - done, static_cast<off_t>(done));
    if (put <= 0) return fail_errno(put < 0 ? errno : EIO, fmt::format("write {}", path.string()));
    done += static_cast<std::size_t>(put);
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Publication>> Publication::begin(const std::filesystem::path& parent,
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
      new Publication(std::move(id), std::move(packed.layout), name));
  const auto segments = publication->layout_.segments();
  for (std::size_t i = 0; i < segments.size(); ++i) {
    TRY_VOID(write_segment(publication->directory_ / segments[i].name, packed.headers[i],
                           segments[i].size_bytes));
  }
  return publication;
}

Publication::~Publication() {
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

Result<std::vector<UniqueFd>> Publication::open_segments() const {
  std::vector<UniqueFd> out;
  for (const auto& segment : layout_.segments()) {
    const auto path = directory_ / segment.name;
    UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    if (!fd) return fail_errno(errno, fmt::format("open {}", path.string()));
    out.push_back(std::move(fd));
  }
  return out;
}

}  // namespace rekindle::worker

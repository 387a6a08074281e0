#include "src/store/segment_pool.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <limits>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "src/base/failpoint.h"
#include "src/base/log.h"
#include "src/base/units.h"
#include "src/store/files.h"

namespace rekindle::store {

namespace {

// Smaller files are not worth their own part of a reserve, and larger files are not cut down to
// them.
constexpr std::uint64_t kLeastResized = 64 * kMiB;

std::pair<std::uint64_t, std::uint64_t> inode_of(const struct stat& status) {
  return {std::uint64_t{status.st_dev}, std::uint64_t{status.st_ino}};
}

std::uint64_t size_of(const struct stat& status) {
  return static_cast<std::uint64_t>(status.st_size);
}

// 0 for a file that the pool has not named.
std::uint64_t number_of(const fs::path& file) {
  const std::string name = file.filename().string();
  std::uint64_t number = 0;
  const auto parsed = std::from_chars(name.data(), name.data() + name.size(), number);
  return parsed.ec == std::errc{} && parsed.ptr == name.data() + name.size() ? number : 0;
}

bool is_whole_file(const struct stat& status) {
  return S_ISREG(status.st_mode) && status.st_size > 0 &&
         static_cast<std::uint64_t>(status.st_blocks) * 512 >= size_of(status);
}

bool is_there(const fs::path& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0;
}

std::uint64_t room_on_file_system(const fs::path& path) {
  struct statvfs status {};
  if (::statvfs(path.c_str(), &status) != 0) return 0;
  return std::uint64_t{status.f_bavail} * status.f_frsize;
}

bool none_lives(const std::vector<std::weak_ptr<const MappedSegment>>& mappings) {
  return std::all_of(mappings.begin(), mappings.end(), [](const auto& m) { return m.expired(); });
}

}  // namespace

void SegmentPool::Doomed::add(fs::path path, std::uint64_t bytes) {
  files_.emplace_back(std::move(path), bytes);
  ++pool_.deleting_;
  pool_.deleting_bytes_ += bytes;
}

Result<void> SegmentPool::Doomed::unlink() {
  Result<void> result;
  for (const auto& [path, bytes] : std::exchange(files_, {})) {
    if (when_ == Deletion::kLater) {
      pool_.unlink_later(path, bytes);
    } else if (auto gone = pool_.unlink(path, bytes); !gone && result) {
      result = std::move(gone);
    }
  }
  return result;
}

SegmentPool::Doomed::~Doomed() {
  if (auto gone = unlink(); !gone) log::warn("store.pool", "error", gone.error());
}

SegmentPool::SegmentPool(fs::path directory, std::uint64_t max_bytes, std::uint64_t reserve_bytes,
                         std::unique_ptr<const NumaPlacement> placement)
    : directory_(std::move(directory)),
      max_bytes_(max_bytes),
      reserve_bytes_(reserve_bytes),
      placement_(std::move(placement)) {}

SegmentPool::~SegmentPool() {
  stopping_ = true;
  Doomed doomed(*this);
  const std::lock_guard lock(mutex_);
  while (!files_.empty()) remove(files_.begin(), doomed);
}

Result<void> SegmentPool::unlink(const fs::path& path, std::uint64_t bytes) {
  auto gone = failpoint("store.pool.delete");
  if (gone) gone = unlink_if_present(path);
  {
    const std::lock_guard lock(mutex_);
    --deleting_;
    deleting_bytes_ -= bytes;
    ++deleted_;
  }
  changed_.notify_all();
  return gone;
}

void SegmentPool::unlink_later(const fs::path& path, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (!deleter_) {
    deleter_ =
        std::make_unique<WorkerPool>("rk-delete", 1, std::numeric_limits<std::size_t>::max());
  }
  deleter_->submit([this, path, bytes] {
    (void)failpoint("store.pool.delete_later");  // to hold it, or to die there
    if (stopping_) return;
    if (auto gone = unlink(path, bytes); !gone) log::warn("store.pool", "error", gone.error());
  });
}

Result<std::shared_ptr<MappedSegment>> SegmentPool::create(const fs::path& path,
                                                           std::uint64_t size_bytes,
                                                           std::uint64_t keep_bytes,
                                                           MappedSegment::NewPages pages) {
  const bool was_there = is_there(path);
  TRY(const bool taken, take(path, size_bytes, pages.preferred_node));
  if (!taken && !was_there) keep_at_most(keep_bytes);
  const auto memory = was_there || taken ? free_memory_of(path) : nullptr;
  TRY(std::shared_ptr<MappedSegment> segment, with_room(size_bytes, [&] {
        return MappedSegment::create(path, size_bytes, *placement_, pages, memory);
      }));
  if (was_there || taken) {
    reopened(segment);
  } else {
    made(segment);
  }
  return segment;
}

Result<bool> SegmentPool::take(const fs::path& path, std::uint64_t size_bytes, int preferred_node) {
  Doomed doomed(*this);
  const std::lock_guard lock(mutex_);
  if (files_.empty() || is_there(path)) return false;
  for (;;) {
    const auto file = best_fit(size_bytes, placement_->node_for(preferred_node));
    if (file == files_.end()) return false;
    if (!unchanged(*file)) {
      remove(file, doomed);
      continue;
    }
    TRY(const bool moved, move_in(path, *file));
    if (!moved) return false;
    files_.erase(file);
    TRY_VOID(failpoint("store.pool.after_take"));
    return true;
  }
}

// The file of this size, else the smallest larger one, else the largest smaller one:
// MappedSegment::create() cuts off or adds the rest. Of several of one size one on this NUMA node,
// of those the newest, so that unused ones grow old. A file is not cut down to a small part of it,
// nor made much larger: fresh pages of a new file cost less than that memory.
SegmentPool::Files::iterator SegmentPool::best_fit(std::uint64_t size_bytes, int numa_node) {
  const auto fits = [&](const File& file) {
    if (file.size_bytes == size_bytes) return true;
    if (size_bytes < kLeastResized) return false;
    return file.size_bytes > size_bytes || file.size_bytes >= size_bytes / 2;
  };
  // Lower is better.
  const auto rank = [&](const File& file) {
    const bool larger = file.size_bytes >= size_bytes;
    return std::tuple(!larger, larger ? file.size_bytes - size_bytes : size_bytes - file.size_bytes,
                      file.numa_node != numa_node);
  };
  auto best = files_.end();
  for (auto file = files_.begin(); file != files_.end(); ++file) {
    if (!fits(*file) || !available(*file)) continue;
    if (best == files_.end() || rank(*file) <= rank(*best)) best = file;
  }
  return best;
}

// A path on another file system is no error: create() then makes a new file.
Result<bool> SegmentPool::move_in(const fs::path& path, const File& file) {
  if (::rename(file.path.c_str(), path.c_str()) == 0) return true;
  if (errno == EXDEV) return false;
  return fail_errno(errno, fmt::format("rename {} to {}", file.path.string(), path.string()));
}

// A process may have taken pages away from the file and given it its size again. Then what is
// registered of it has lost its pages.
std::shared_ptr<FileMemory> SegmentPool::free_memory_of(const fs::path& path) const {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0 || !is_whole_file(status)) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto own = own_.find(inode_of(status));
  if (own == own_.end() || !none_lives(own->second.mappings)) return nullptr;
  const auto& memory = own->second.memory;
  return memory != nullptr && memory->size_bytes() == size_of(status) ? memory : nullptr;
}

void SegmentPool::made(const std::shared_ptr<MappedSegment>& segment) {
  if (max_bytes_ == 0) return;
  struct stat status {};
  if (::fstat(segment->fd(), &status) != 0) return;
  const std::lock_guard lock(mutex_);
  // The file that had this number before is gone.
  own_[inode_of(status)] = {
      {segment}, segment->lent_for_writing_, segment->memory_, segment->numa_node()};
}

void SegmentPool::reopened(const std::shared_ptr<MappedSegment>& segment) {
  struct stat status {};
  if (::fstat(segment->fd(), &status) != 0) return;
  const std::lock_guard lock(mutex_);
  const auto own = own_.find(inode_of(status));
  if (own == own_.end()) return;
  segment->lent_for_writing_ = own->second.lent_for_writing;
  own->second.memory = segment->memory_;
  own->second.numa_node = segment->numa_node();
  Mappings& mappings = own->second.mappings;
  std::erase_if(mappings, [](const auto& mapping) { return mapping.expired(); });
  mappings.push_back(segment);
}

Result<void> SegmentPool::put(const fs::path& path, Deletion when) {
  Doomed doomed(*this, when);
  Doomed in_place(*this);
  {
    const std::lock_guard lock(mutex_);
    TRY_VOID(keep(path, doomed, in_place));
  }
  return in_place.unlink();
}

// Moves the file into the pool's directory, where it is kept or doomed; `in_place` if it must not
// move.
Result<void> SegmentPool::keep(const fs::path& path, Doomed& doomed, Doomed& in_place) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) {
    if (errno == ENOENT) return {};
    return fail_errno(errno, fmt::format("stat {}", path.string()));
  }
  const Inode inode = inode_of(status);
  if (status.st_nlink > 1) {  // another name keeps the bytes
    own_.erase(inode);
    in_place.add(path, 0);
    return {};
  }
  const std::uint64_t size = size_of(status);
  const bool wanted = own_.contains(inode) && is_whole_file(status) && size <= max_bytes();
  if (!wanted) own_.erase(inode);
  if (!wanted && doomed.when() == Deletion::kNow) {
    in_place.add(path, size);
    return {};
  }
  while (wanted && bytes_locked() > max_bytes() - size) remove(files_.begin(), doomed);
  fs::path here = directory_ / fmt::format("{}", ++last_number_);
  if (auto moved = rename_file(path, here); !moved) {
    log::warn("store.pool", "file", path.string(), "error", moved.error(), "action", "deleted");
    own_.erase(inode);
    in_place.add(path, size);
    return {};
  }
  if (!wanted) {
    doomed.add(std::move(here), size);
    return {};
  }
  files_.push_back({std::move(here), size, inode, own_[inode].numa_node, std::nullopt});
  return failpoint("store.pool.after_put");
}

Result<void> SegmentPool::discard_leftovers() {
  TRY(const auto entries, entries_of(directory_));
  Doomed doomed(*this, Deletion::kLater);
  const std::lock_guard lock(mutex_);
  for (const fs::path& entry : entries) {
    struct stat status {};
    if (::lstat(entry.c_str(), &status) != 0) {
      return fail_errno(errno, fmt::format("stat {}", entry.string()));
    }
    if (S_ISDIR(status.st_mode)) {
      TRY_VOID(remove_tree(entry));
      continue;
    }
    last_number_ = std::max(last_number_, number_of(entry));  // so that no file takes its place
    doomed.add(entry, status.st_nlink > 1 ? 0 : size_of(status));
  }
  return {};
}

void SegmentPool::give_up(const MappedSegment& segment) {
  struct stat status {};
  if (::fstat(segment.fd(), &status) != 0) return;
  Doomed doomed(*this);
  const std::lock_guard lock(mutex_);
  const Inode inode = inode_of(status);
  const auto file = std::find_if(files_.begin(), files_.end(),
                                 [&](const File& one) { return one.inode == inode; });
  if (file != files_.end()) remove(file, doomed);
  own_.erase(inode);
}

void SegmentPool::trim(TimePoint now) {
  Doomed doomed(*this);
  const std::lock_guard lock(mutex_);
  std::set<Inode> here;
  for (const File& file : files_) here.insert(file.inode);
  for (auto& [inode, own] : own_) {
    if (!here.contains(inode) && none_lives(own.mappings)) own.memory.reset();
  }
  std::uint64_t left = available_locked();
  for (auto file = files_.begin(); file != files_.end();) {
    if (available(*file) && !unchanged(*file)) {
      left -= file->size_bytes;
      file = remove(file, doomed);
      continue;
    }
    if (!file->seen) file->seen = now;
    const std::uint64_t size = available(*file) ? file->size_bytes : 0;
    const bool spare = size == 0 || left - size >= reserve_bytes_;
    if (now - *file->seen < kMaxAge || !spare) {
      ++file;
      continue;
    }
    left -= size;
    file = remove(file, doomed);
  }
}

void SegmentPool::grow_reserve(std::uint64_t copy_bytes) {
  const std::lock_guard lock(mutex_);
  if (reserve_bytes_ != 0 && copy_bytes > reserve_bytes_) reserve_bytes_ = copy_bytes;
}

Result<std::uint64_t> SegmentPool::top_up(std::uint64_t room_bytes,
                                          const std::function<void(MappedSegment&)>& prepare) {
  fs::path path;
  std::uint64_t size = 0;
  int node = -1;
  {
    const std::lock_guard lock(mutex_);
    const std::uint64_t there = available_locked() + deleting_bytes_;
    const std::uint64_t wanted = std::min<std::uint64_t>(reserve_bytes_, room_bytes);
    size = std::min(kMaxSegmentBytes, wanted - std::min(wanted, there));
    if (size < kLeastResized) return 0;
    node = placement_->preferred_in_turn(++last_number_);
    path = directory_ / fmt::format("{}", last_number_);
    making_bytes_ = size;
  }
  auto added = add_file(path, size, node, prepare);
  {
    const std::lock_guard lock(mutex_);
    making_bytes_ = 0;
  }
  changed_.notify_all();
  TRY_VOID(added);
  return size;
}

// Nobody else finds the file before it is in the list, and then it is whole.
Result<void> SegmentPool::add_file(const fs::path& path, std::uint64_t size_bytes,
                                   int preferred_node,
                                   const std::function<void(MappedSegment&)>& prepare) {
  TRY(std::shared_ptr<MappedSegment> segment,
      MappedSegment::create(path, size_bytes, *placement_, {preferred_node, false}));
  struct stat status {};
  if (::fstat(segment->fd(), &status) != 0) return fail_errno(errno, path.string());
  made(segment);
  if (prepare) prepare(*segment);
  const std::lock_guard lock(mutex_);
  files_.push_back({path, size_bytes, inode_of(status), segment->numa_node(), std::nullopt});
  return {};
}

std::uint64_t SegmentPool::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_locked();
}

std::uint64_t SegmentPool::deleted() const {
  const std::lock_guard lock(mutex_);
  return deleted_;
}

bool SegmentPool::make_room(std::uint64_t bytes, std::uint64_t deleted_before) {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
      return (deleting_ == 0 && making_bytes_ == 0) ||
             (deleted_ != deleted_before && room_on_file_system(directory_) >= bytes);
    });
    if (deleted_ != deleted_before) return true;  // another thread has made some meanwhile
  }
  bool made = false;
  do {
    const std::uint64_t room = room_on_file_system(directory_);
    std::uint64_t size = 0;
    {
      Doomed doomed(*this);
      const std::lock_guard lock(mutex_);
      const auto file = largest_available();
      if (file == files_.end()) break;
      size = file->size_bytes;
      remove(file, doomed);
    }
    await_room(bytes, room + size / 2);
    made = true;
  } while (room_on_file_system(directory_) < bytes);
  return made;
}

// A device process that pins a file, and a reader on this host, let go of it soon after its last
// name is gone. The kernel tells nobody when its room is free.
void SegmentPool::await_room(std::uint64_t wanted, std::uint64_t expected) const {
  constexpr std::chrono::seconds kPatience{3};
  constexpr std::chrono::milliseconds kLook{10};
  const TimePoint give_up = steady_now() + kPatience;
  while (steady_now() < give_up && !stopping_) {
    const std::uint64_t room = room_on_file_system(directory_);
    if (room >= std::min(wanted, expected)) return;
    std::this_thread::sleep_for(kLook);
  }
}

void SegmentPool::keep_at_most(std::uint64_t bytes) {
  std::uint64_t there = 0;
  {
    Doomed doomed(*this);
    std::unique_lock lock(mutex_);
    // A file of the reserve that is being made takes memory, and can be deleted once it is there.
    changed_.wait(
        lock, [&] { return making_bytes_ == 0 || available_locked() + making_bytes_ <= bytes; });
    there = available_locked();
    while (there > bytes) {
      const auto file = largest_available();
      if (file == files_.end()) break;
      there -= file->size_bytes;
      remove(file, doomed);
    }
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return deleting_bytes_ == 0 || there + deleting_bytes_ <= bytes; });
}

bool SegmentPool::available(const File& file) const {
  const auto own = own_.find(file.inode);
  return own != own_.end() && none_lives(own->second.mappings);
}

bool SegmentPool::unchanged(const File& file) const {
  struct stat status {};
  return ::lstat(file.path.c_str(), &status) == 0 && inode_of(status) == file.inode &&
         size_of(status) == file.size_bytes && status.st_nlink == 1;
}

std::uint64_t SegmentPool::bytes_locked() const {
  std::uint64_t bytes = 0;
  for (const File& file : files_) bytes += file.size_bytes;
  return bytes;
}

std::uint64_t SegmentPool::available_locked() const {
  std::uint64_t bytes = 0;
  for (const File& file : files_) bytes += available(file) ? file.size_bytes : 0;
  return bytes;
}

SegmentPool::Files::iterator SegmentPool::largest_available() {
  auto largest = files_.end();
  for (auto file = files_.begin(); file != files_.end(); ++file) {
    if (!available(*file)) continue;
    if (largest == files_.end() || file->size_bytes > largest->size_bytes) largest = file;
  }
  return largest;
}

SegmentPool::Files::iterator SegmentPool::remove(Files::iterator file, Doomed& doomed) {
  doomed.add(std::move(file->path), file->size_bytes);
  own_.erase(file->inode);
  return files_.erase(file);
}

}  // namespace rekindle::store

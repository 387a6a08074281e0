#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <tuple>
#include <vector>

#include "src/base/clock.h"
#include "src/base/unique_fd.h"
#include "transport/shm/shm_protocol.h"

namespace rekindle::transport::shm {

// A read-only mapping of a region and the pages around it.
class Mapping {
 public:
  // Null: the file does not hold the range that the reply names.
  static std::shared_ptr<const Mapping> create(const UniqueFd& fd, const RegionReply& reply);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  Mapping(void* base, std::size_t length, std::span<const std::byte> bytes)
      : base_(base), length_(length), bytes_(bytes) {}
  void* const base_;
  const std::size_t length_;
  const std::span<const std::byte> bytes_;
};

// The mappings of the files of other processes on this host. A source writes its next version into
// the same files, so a mapping with its page tables stays for a while after its last use. Without
// them, reading a region costs a page fault for every 16 pages. A mapping goes at once when its
// file loses a name, because it would keep the memory of a deleted file from being freed. Nobody
// reads through a mapping that is only kept. Thread-safe.
class SourceMappings {
 public:
  // `kept`: how long a mapping stays after its last use.
  explicit SourceMappings(Duration kept = std::chrono::seconds(60)) : kept_for_(kept) {}
  ~SourceMappings();
  SourceMappings(const SourceMappings&) = delete;
  SourceMappings& operator=(const SourceMappings&) = delete;

  // As Mapping::create().
  std::shared_ptr<const Mapping> open(const UniqueFd& fd, const RegionReply& reply);
  // Mappings that are in use or kept.
  std::size_t size() const;

 private:
  // Device and number of the file, begin and size of the region.
  using Key = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;
  struct Kept {
    std::shared_ptr<const Mapping> mapping;
    int watch = -1;
    TimePoint until;
  };

  bool start();
  void wake();
  void run();
  // The caller of these holds mutex_. They leave the unmapping to the thread.
  void drop_nameless();
  std::optional<TimePoint> drop_old(TimePoint now);
  void drop_if(const std::function<bool(const Kept&)>& goes);
  void unwatch(int watch);

  const Duration kept_for_;
  mutable std::mutex mutex_;
  std::map<Key, Kept> kept_;  // guarded by mutex_
  // Taken out of kept_, to be unmapped without the lock: that takes long, and frees the file if it
  // has no name. Guarded by mutex_.
  std::vector<std::shared_ptr<const Mapping>> doomed_;
  bool stopping_ = false;  // guarded by mutex_
  // Set before the thread starts.
  UniqueFd inotify_;
  UniqueFd wake_;       // eventfd
  std::thread thread_;  // "rk-shm-keep", from the first mapping on
};

}  // namespace rekindle::transport::shm

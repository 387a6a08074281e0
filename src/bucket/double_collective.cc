#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/base/ids.h"
#include "src/base/units.h"
#include "src/bucket/double_device.h"
#include "src/bucket/double_stream.h"

// Ranks meet in a memfd. The maker of the id keeps it open until all have met, and others open it
// through /proc, so it disappears with the last process, however that ends. Bytes go through a
// staging area per share, one chunk at a time. The owner writes chunk n after all ranks have read
// chunk n - kDoubleChunksAhead; the others read it after it is written.
namespace rekindle::bucket {

namespace {

constexpr const char* kMeetingFileName = "rekindle-meeting";
constexpr std::uint32_t kMostRanks = 64;
constexpr std::uint64_t kChunk = 512 << 10;
// Ids by which no ranks have met are kept for this long.
constexpr std::chrono::minutes kUnmetKept{1};

using Nonce = std::array<std::uint8_t, 16>;

struct alignas(64) RankState {
  std::atomic<std::uint64_t> here;
  std::atomic<std::uint64_t> read;  // chunks of each share
};
struct alignas(64) ShareState {
  std::atomic<std::uint64_t> written;  // chunks
};
// The zeros of a new memfd are a board without ranks.
struct Board {
  Nonce nonce;
  std::atomic<std::uint64_t> ranks;
  std::array<RankState, kMostRanks> rank;
  std::array<ShareState, kMostRanks> share;
};
constexpr std::uint64_t kStagingAt = (sizeof(Board) + 4095) / 4096 * 4096;
constexpr std::uint64_t kFileBytes =
    kStagingAt + kMostRanks * kDoubleChunksAhead * kChunk;  // as it is touched

// The contents of an id.
struct Place {
  pid_t pid = 0;
  int fd = -1;
  Nonce nonce{};

  std::string to_string() const {
    return fmt::format("double:{}:{}:{}", pid, fd, to_hex(nonce.data(), nonce.size()));
  }
  static std::optional<Place> parse(std::string_view text) {
    constexpr std::string_view kPrefix = "double:";
    if (!text.starts_with(kPrefix)) return std::nullopt;
    const char* const end = text.data() + text.size();
    Place place;
    const auto pid = std::from_chars(text.data() + kPrefix.size(), end, place.pid);
    if (pid.ec != std::errc() || place.pid <= 0 || pid.ptr == end || *pid.ptr != ':') {
      return std::nullopt;
    }
    const auto fd = std::from_chars(pid.ptr + 1, end, place.fd);
    if (fd.ec != std::errc() || place.fd < 0 || fd.ptr == end || *fd.ptr != ':') {
      return std::nullopt;
    }
    const std::string_view hex(fd.ptr + 1, static_cast<std::size_t>(end - fd.ptr - 1));
    if (!from_hex(hex, place.nonce.data(), place.nonce.size())) return std::nullopt;
    return place;
  }
};

// One rank's view of a meeting. Its queued work may outlive the rank.
class Meeting {
 public:
  explicit Meeting(std::unique_ptr<Mapping> mapping) : mapping_(std::move(mapping)) {}

  static Result<std::shared_ptr<Meeting>> open(const Place& place) {
    const std::string path = fmt::format("/proc/{}/fd/{}", place.pid, place.fd);
    const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    if (!fd && errno != ENOENT && errno != ESRCH && errno != ENXIO) {
      return fail_errno(errno, "open the meeting of double devices");
    }
    struct stat info {};
    const bool ours = fd && ::fstat(fd.get(), &info) == 0 && info.st_uid == ::geteuid() &&
                      has_fixed_size(fd.get(), kFileBytes);
    if (!ours) return gone();
    TRY(auto mapping, Mapping::of(fd.get(), kFileBytes));
    auto meeting = std::make_shared<Meeting>(std::move(mapping));
    // The descriptor belongs to another file now.
    if (meeting->board().nonce != place.nonce) return gone();
    return meeting;
  }

  Board& board() const { return *static_cast<Board*>(mapping_->data()); }
  std::byte* staging(std::uint64_t share, std::uint64_t chunk) const {
    return static_cast<std::byte*>(mapping_->data()) + kStagingAt +
           (share * kDoubleChunksAhead + chunk % kDoubleChunksAhead) * kChunk;
  }

  Result<void> arrive(std::uint32_t rank, std::uint32_t ranks) {
    std::uint64_t said = 0;
    if (!board().ranks.compare_exchange_strong(said, ranks) && said != ranks) {
      return fail(ErrorCode::kInvalid, "rank {} of {} came to a meeting of {}", rank, ranks, said);
    }
    if (board().rank[rank].here.exchange(1) == 0) return {};
    return fail(ErrorCode::kInvalid, "rank {} of {} came to a meeting twice", rank, ranks);
  }
  bool all_here(std::uint32_t ranks) const {
    return std::all_of(board().rank.begin(), board().rank.begin() + ranks,
                       [](const RankState& one) { return one.here.load() != 0; });
  }

  std::atomic<bool> aborted = false;

 private:
  static Failure gone() {
    return fail(ErrorCode::kPeerLost,
                "the meeting of double devices is over, or who made its id has ended");
  }
  const std::unique_ptr<Mapping> mapping_;
};

// One spread() of one rank. It runs on the rank's stream.
struct Exchange {
  std::shared_ptr<Meeting> meeting;
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;
  std::byte* at = nullptr;
  std::uint64_t share_bytes = 0;
  std::vector<std::uint32_t> owners;
  std::uint64_t first_chunk = 0;

  bool operator()(const std::atomic<bool>& stop) const {
    for (std::uint64_t offset = 0, chunk = first_chunk; offset < share_bytes;
         offset += kChunk, ++chunk) {
      // Aborted work lets the work behind it run, like NCCL's kernels.
      if (!write(offset, chunk, stop) || !read(offset, chunk, stop)) return !stop.load();
      meeting->board().rank[rank].read.store(chunk + 1);
    }
    return true;
  }

 private:
  template <typename Ready>
  bool wait(const std::atomic<bool>& stop, const Ready& ready) const {
    std::chrono::microseconds pause{1};
    while (!stop.load() && !meeting->aborted.load()) {
      if (ready()) return true;
      nap(pause);
    }
    return false;
  }
  std::byte* place(std::uint64_t share, std::uint64_t offset) const {
    return at + share * share_bytes + offset;
  }
  std::uint64_t bytes(std::uint64_t offset) const { return std::min(kChunk, share_bytes - offset); }

  bool write(std::uint64_t offset, std::uint64_t chunk, const std::atomic<bool>& stop) const {
    Board& board = meeting->board();
    for (std::size_t share = 0; share < owners.size(); ++share) {
      if (owners[share] != rank) continue;
      const auto room = [&] {
        return std::all_of(
            board.rank.begin(), board.rank.begin() + ranks,
            [chunk](const RankState& one) { return one.read.load() + kDoubleChunksAhead > chunk; });
      };
      if (!wait(stop, room)) return false;
      std::memcpy(meeting->staging(share, chunk), place(share, offset), bytes(offset));
      board.share[share].written.store(chunk + 1);
    }
    return true;
  }

  bool read(std::uint64_t offset, std::uint64_t chunk, const std::atomic<bool>& stop) const {
    for (std::size_t share = 0; share < owners.size(); ++share) {
      if (owners[share] == rank) continue;
      const auto& written = meeting->board().share[share].written;
      if (!wait(stop, [&] { return written.load() > chunk; })) return false;
      std::memcpy(place(share, offset), meeting->staging(share, chunk), bytes(offset));
    }
    return true;
  }
};

// The meetings whose ids were made here. They are open for ranks to join.
class Registry {
 public:
  Result<std::string> add() {
    TRY(UniqueFd fd, make_memfd(kMeetingFileName, kFileBytes));
    TRY(const auto mapping, Mapping::of(fd.get(), kFileBytes));
    Place place{::getpid(), fd.get(), {}};
    fill_random(place.nonce.data(), place.nonce.size());
    static_cast<Board*>(mapping->data())->nonce = place.nonce;
    const TimePoint now = SteadyClock().now();
    const std::lock_guard lock(mutex_);
    std::erase_if(open_, [now](const auto& one) { return now - one.second.made >= kUnmetKept; });
    std::string id = place.to_string();
    open_.emplace(id, Open{std::move(fd), now});
    return id;
  }
  void close(const std::string& id) {
    const std::lock_guard lock(mutex_);
    open_.erase(id);
  }

 private:
  struct Open {
    UniqueFd fd;
    TimePoint made{};
  };
  std::mutex mutex_;
  // By id. Guarded by mutex_.
  std::map<std::string, Open> open_;
};

class DoubleCollective final : public Collective {
 public:
  DoubleCollective(Registry& registry, std::string id, std::shared_ptr<Meeting> meeting,
                   std::uint32_t rank, std::uint32_t ranks)
      : registry_(registry),
        id_(std::move(id)),
        meeting_(std::move(meeting)),
        rank_(rank),
        ranks_(ranks) {}
  ~DoubleCollective() override { abort(); }

  std::uint32_t rank() const override { return rank_; }
  std::uint32_t ranks() const override { return ranks_; }

  Result<void> spread(DeviceAddress at, std::uint64_t share_bytes,
                      std::span<const std::uint32_t> owners, Stream& stream) override {
    TRY_VOID(check_lives());
    if (owners.size() > kMostRanks) {
      return fail(ErrorCode::kInvalid, "{} shares are more than double devices spread: {}",
                  owners.size(), kMostRanks);
    }
    for (const std::uint32_t owner : owners) {
      if (owner < ranks_) continue;
      return fail(ErrorCode::kInvalid, "a share is said to be rank {}'s of {}", owner, ranks_);
    }
    Exchange exchange{.meeting = meeting_,
                      .rank = rank_,
                      .ranks = ranks_,
                      .at = reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(at)),
                      .share_bytes = share_bytes,
                      .owners = {owners.begin(), owners.end()},
                      .first_chunk = chunks_};
    chunks_ += (share_bytes + kChunk - 1) / kChunk;
    return push_work(stream, std::move(exchange));
  }

  Result<bool> settled() override {
    TRY_VOID(check_lives());
    if (met_) return true;
    met_ = meeting_->all_here(ranks_);
    if (met_) registry_.close(id_);
    return met_;
  }

  void abort() override {
    meeting_->aborted.store(true);
    registry_.close(id_);
  }

 private:
  Result<void> check_lives() const {
    if (!meeting_->aborted.load()) return {};
    return fail(ErrorCode::kStale, "rank {} of {} was aborted: meet again", rank_, ranks_);
  }

  Registry& registry_;
  const std::string id_;
  const std::shared_ptr<Meeting> meeting_;
  const std::uint32_t rank_;
  const std::uint32_t ranks_;
  // Of each share, queued so far.
  std::uint64_t chunks_ = 0;
  bool met_ = false;
};

class DoubleCollectives final : public Collectives {
 public:
  Result<std::string> make_id() override { return registry_.add(); }
  Result<std::unique_ptr<Collective>> meet(Device& device, std::uint32_t rank, std::uint32_t ranks,
                                           std::string_view id) override {
    if (!is_double(device.id())) {
      return fail(ErrorCode::kInvalid, "{} is no double: it meets others by NCCL", device.id());
    }
    if (rank >= ranks || ranks > kMostRanks) {
      return fail(ErrorCode::kInvalid, "rank {} of {} cannot meet: double devices are at most {}",
                  rank, ranks, kMostRanks);
    }
    const auto place = Place::parse(id);
    if (!place) return fail(ErrorCode::kInvalid, "double devices do not meet by such an id");
    TRY(auto meeting, Meeting::open(*place));
    TRY_VOID(meeting->arrive(rank, ranks));
    return std::make_unique<DoubleCollective>(registry_, std::string(id), std::move(meeting), rank,
                                              ranks);
  }

 private:
  Registry registry_;
};

}  // namespace

std::unique_ptr<Collectives> make_double_collectives() {
  return std::make_unique<DoubleCollectives>();
}

}  // namespace rekindle::bucket

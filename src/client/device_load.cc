#include "src/client/device_load.h"

#include <algorithm>
#include <charconv>
#include <new>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include <poll.h>

#include <time.h>

#include "src/base/worker_pool.h"
#include "src/bucket/double_device.h"

#if REKINDLE_WITH_CUDA
#include "src/cuda/device.h"
#include "src/cuda/driver.h"
#endif

namespace rekindle::client {

namespace {

// Memory is taken only when it is used.
constexpr std::uint64_t kDoubleBytes = 8ull << 30;
constexpr std::string_view kCuda = "cuda";

// The number in "cuda:N".
std::optional<int> ordinal_of(std::string_view name) {
  if (!name.starts_with(kCuda) || name.substr(kCuda.size(), 1) != ":") return std::nullopt;
  const std::string_view digits = name.substr(kCuda.size() + 1);
  int ordinal = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), ordinal);
  if (error != std::errc() || end != digits.data() + digits.size() || ordinal < 0) {
    return std::nullopt;
  }
  return ordinal;
}

bool is_gpu(std::string_view name) {
  return name == kCuda || name.starts_with("GPU-") || name.starts_with("MIG-") || ordinal_of(name);
}

Result<std::unique_ptr<bucket::Device>> open_gpu([[maybe_unused]] std::string_view name) {
#if REKINDLE_WITH_CUDA
  TRY(const auto driver, cuda::Driver::load());
  if (const auto ordinal = ordinal_of(name)) return cuda::open_device(driver, *ordinal);
  if (name != kCuda) return cuda::open_device_by_id(driver, name);
  TRY(const int current, cuda::current_device_ordinal(*driver));
  return cuda::open_device(driver, current);
#else
  return fail(ErrorCode::kUnavailable, "this librekindle was built without CUDA");
#endif
}

Result<std::unique_ptr<bucket::Device>> open_device(const std::string& name) {
  if (bucket::is_double(name)) return bucket::make_double_device(name, kDoubleBytes);
  if (is_gpu(name)) return open_gpu(name);
  return fail(ErrorCode::kInvalid,
              "'{}' is no device: say \"cuda\", \"cuda:1\", a GPU's UUID or \"double:0\"", name);
}

}  // namespace

Result<WorkerDevice> open_worker_device(const std::string& name, void* stream) {
  const SignalsBlocked blocked;
  WorkerDevice worker;
  TRY(worker.device, open_device(name));
  TRY(worker.stream, worker.device->borrow_stream(stream));
  return worker;
}

namespace {

constexpr std::chrono::seconds kReadsPatience{10};
constexpr std::chrono::microseconds kReadsLook{50};
constexpr std::string_view kNoReason = "the agent has no device process";

template <typename Call>
auto or_out_of_memory(Call call) -> decltype(call()) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return fail(ErrorCode::kExhausted, "out of memory");
  }
}

timespec to_timespec(Duration duration) {
  const auto whole = std::chrono::duration_cast<std::chrono::seconds>(duration);
  timespec out{};
  out.tv_sec = static_cast<time_t>(whole.count());
  out.tv_nsec = static_cast<long>((duration - whole).count());
  return out;
}

// Descriptor -1 is ignored.
void poll_for(int one, int other, Duration patience, TimePoint deadline) {
  const Duration left = deadline - steady_now();
  const timespec most = to_timespec(std::max(std::min(left, patience), Duration{0}));
  pollfd entries[2] = {{one, POLLIN, 0}, {other, POLLIN, 0}};
  (void)::ppoll(entries, 2, &most, nullptr);
}

}  // namespace

Result<std::unique_ptr<DeviceLoad>> DeviceLoad::create(WorkerDevice device, ReadContents read,
                                                       Source source) {
  std::unique_ptr<DeviceLoad> load(new DeviceLoad(std::move(device), std::move(read)));
  TRY_VOID(load->begin(std::move(source)));
  return load;
}

DeviceLoad::DeviceLoad(WorkerDevice device, ReadContents read)
    : worker_(std::move(device)),
      read_(std::move(read)),
      stash_(*worker_.device, *worker_.stream) {}

DeviceLoad::~DeviceLoad() {
  if (wait_for_reads()) return;
  // The device may still read this memory, so it and its owners stay.
  (void)feed_.release();
  stash_.leak();
  (void)worker_.stream.release();
  (void)worker_.device.release();
}

// Waits for an event, because the stream is the caller's and may have further work.
bool DeviceLoad::wait_for_reads() {
  if (!has_reads_ || ended_) return true;
  auto event = worker_.device->make_event();
  if (!event || !worker_.stream->record(**event)) return false;
  const TimePoint give_up = steady_now() + kReadsPatience;
  for (;;) {
    const auto done = worker_.device->is_done(**event);
    if (done && *done) return true;
    if (!done || steady_now() >= give_up) {
      (void)event->release();
      return false;
    }
    std::this_thread::sleep_for(kReadsLook);
  }
}

Result<void> DeviceLoad::begin(Source source) {
  source_ = std::move(source);
  if (source_.segments.files.size() != source_.segments.bytes.size()) {
    return fail(ErrorCode::kInternal, "the agent sent {} descriptors for {} segments",
                source_.segments.files.size(), source_.segments.bytes.size());
  }
  if (!source_.channel) {
    return upload(source_.no_channel.empty() ? std::string(kNoReason) : source_.no_channel);
  }
  TRY(auto ipc, IpcFeed::create(*worker_.device, *worker_.stream, std::move(source_.channel)));
  ipc_ = ipc.get();
  feed_ = std::move(ipc);
  path_ = "ipc";
  return {};
}

Result<void> DeviceLoad::upload(std::string why) {
  path_ = fmt::format("upload: {}", why);
  TRY(const auto* const contents, read_());
  TRY(auto uploads, UploadFeed::create(*worker_.device, *worker_.stream, *contents,
                                       source_.segments, source_.bucket_bytes));
  TRY_VOID(uploads->mark_ready(tiles_));
  keep_feed();
  feed_ = std::move(uploads);
  return {};
}

Result<void> DeviceLoad::begin_progress() {
  if (progress_) return {};
  TRY(const auto* const contents, read_());
  progress_.emplace(*contents);
  return {};
}

Result<void> DeviceLoad::aim(std::span<const rk_target> targets) {
  TRY_VOID(begin_progress());
  TRY(const auto* const contents, read_());
  return targets_.aim(contents->pieces(), targets, *progress_);
}

void DeviceLoad::keep_feed() {
  ipc_ = nullptr;
  source_ = {};
  tiles_ = {};
}

Result<void> DeviceLoad::mark_ready(const VerifiedTiles& tiles) {
  if (ipc_ == nullptr) return feed_->mark_ready(tiles);
  tiles_.ready.insert(tiles_.ready.end(), tiles.ready.begin(), tiles.ready.end());
  tiles_.all = tiles_.all || tiles.all;
  return {};
}

Result<std::optional<FilledBucket>> DeviceLoad::take() {
  if (failed_) return fail(*failed_);
  auto taken = or_out_of_memory([this] { return poll(); });
  if (!taken) failed_ = taken.error();
  return taken;
}

Result<DeviceLoad::Stashed> DeviceLoad::prefetch(std::uint64_t limit) {
  if (stash_.bytes() >= limit) return Stashed::kNoMore;
  return stash([limit](std::uint64_t free) { return std::min(limit, free / 4); });
}

Result<DeviceLoad::Stashed> DeviceLoad::stage(std::uint64_t reserve) {
  return stash([reserve](std::uint64_t free) { return free > reserve ? free - reserve : 0; });
}

Result<std::uint64_t> DeviceLoad::free_bytes() const {
  TRY(const auto memory, worker_.device->memory());
  return memory.free_bytes;
}

Result<DeviceLoad::Stashed> DeviceLoad::stash(const Room& room) {
  if (failed_) return fail(*failed_);
  auto taken = or_out_of_memory([&] { return stash_one(room); });
  if (!taken) failed_ = taken.error();
  return taken;
}

Result<DeviceLoad::Stashed> DeviceLoad::stash_one(const Room& room) {
  if (kept_) return Stashed::kNoRoom;
  if (holder_ != Holder::kNone || feed_->ended()) return Stashed::kNoMore;
  TRY(auto bucket, poll_feed());
  if (!bucket) return feed_->ended() ? Stashed::kNoMore : Stashed::kNothingYet;
  TRY(const std::uint64_t free, free_bytes());
  bool put = false;
  if (stash_.bytes() + bucket->bytes <= room(free + stash_.bytes())) {
    TRY(put, stash_.put(*bucket));
  }
  if (!put) {
    kept_ = std::move(bucket);
    return Stashed::kNoRoom;
  }
  TRY_VOID(feed_->give_back());
  return Stashed::kOne;
}

Result<std::optional<FilledBucket>> DeviceLoad::poll() {
  TRY_VOID(begin_progress());
  TRY_VOID(give_back());
  TRY(const bool let_go, stash_.let_go());
  TRY(auto bucket, next());
  if (bucket) {
    TRY_VOID(progress_->account(*bucket));
    return bucket;
  }
  if (!feed_->ended() || !let_go) return bucket;
  if (progress_->whole() != progress_->total()) {
    return fail(ErrorCode::kInternal, "the buckets have ended, and {} of {} tensors are not whole",
                progress_->total() - progress_->whole(), progress_->total());
  }
  ended_ = true;
  return bucket;
}

Result<void> DeviceLoad::give_back() {
  const Holder holder = std::exchange(holder_, Holder::kNone);
  if (holder == Holder::kStash) return stash_.give_back();
  if (holder == Holder::kFeed) return feed_->give_back();
  return {};
}

Result<std::optional<FilledBucket>> DeviceLoad::next() {
  if (!stash_.empty()) {
    auto bucket = stash_.take();
    if (bucket && *bucket) holder_ = Holder::kStash;
    return bucket;
  }
  if (kept_) {
    holder_ = Holder::kFeed;
    return std::exchange(kept_, std::nullopt);
  }
  TRY(auto bucket, poll_feed());
  if (bucket) holder_ = Holder::kFeed;
  return bucket;
}

Result<std::optional<FilledBucket>> DeviceLoad::poll_feed() {
  auto polled = feed_->poll(steady_now());
  // Bytes that were wrong on the device may be wrong in host memory, too (kCorrupt). An agent that
  // verifies uploads allows no others (kDenied).
  const bool is_final = !polled && (polled.error().code() == ErrorCode::kCorrupt ||
                                    polled.error().code() == ErrorCode::kDenied);
  if (!polled && !is_final && ipc_ != nullptr && ipc_->untouched()) {
    const Error why = polled.error();
    if (auto ok = upload(why.message()); !ok) {
      return fail(std::move(ok).error().with_context(fmt::format("upload ({})", why.message())));
    }
    polled = feed_->poll(steady_now());
  }
  if (polled && *polled) {
    has_reads_ = true;
    keep_feed();
  }
  return polled;
}

Result<void> DeviceLoad::move(const FilledBucket& bucket) {
  auto queued = or_out_of_memory([&]() -> Result<void> {
    const auto moves = targets_.moves_of(bucket);
    if (moves.empty()) return {};
    return worker_.stream->move(moves);
  });
  // The bucket is not taken again.
  if (!queued) failed_ = queued.error();
  return queued;
}

void DeviceLoad::wait(int wake, TimePoint deadline) const {
  if (!stash_.empty() || feed_->ended()) return poll_for(wake, -1, kEventPatience, deadline);
  wait_for_feed(wake, deadline);
}

void DeviceLoad::wait_for_feed(int wake, TimePoint deadline) const {
  poll_for(wake, feed_->fd(), feed_->patience(), deadline);
}

}  // namespace rekindle::client

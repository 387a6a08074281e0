#include "src/client/device_load.h"

#include <algorithm>
#include <new>
#include <string_view>
#include <thread>
#include <utility>

#include <poll.h>

#include <time.h>

namespace rekindle::client {

namespace {

constexpr std::chrono::seconds kReadsPatience{10};
constexpr std::chrono::microseconds kReadsLook{50};
constexpr std::string_view kNoReason = "the agent has no device process";

std::uint64_t missing_at_first(const bucket::Piece& piece) {
  return std::max<std::uint64_t>(piece.bytes, 1);
}

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

// -1 is passed over.
void poll_for(int one, int other, Duration patience, TimePoint deadline) {
  const Duration left = deadline - SteadyClock().now();
  const timespec most = to_timespec(std::max(std::min(left, patience), Duration{0}));
  pollfd entries[2] = {{one, POLLIN, 0}, {other, POLLIN, 0}};
  (void)::ppoll(entries, 2, &most, nullptr);
}

}  // namespace

Result<std::unique_ptr<DeviceLoad>> DeviceLoad::create(WorkerDevice device,
                                                       const bucket::Contents& contents,
                                                       Source source) {
  std::unique_ptr<DeviceLoad> load(new DeviceLoad(std::move(device), contents));
  TRY_VOID(load->begin(std::move(source)));
  return load;
}

DeviceLoad::DeviceLoad(WorkerDevice device, const bucket::Contents& contents)
    : worker_(std::move(device)), contents_(contents), stash_(*worker_.device, *worker_.stream) {
  missing_.reserve(contents.pieces().size());
  for (const bucket::Piece& piece : contents.pieces()) missing_.push_back(missing_at_first(piece));
}

DeviceLoad::~DeviceLoad() {
  if (wait_for_reads()) return;
  // Memory that the device may still read is not let go, nor what it belongs to.
  (void)feed_.release();
  stash_.leak();
  (void)worker_.stream.release();
  (void)worker_.device.release();
}

// Of buckets that were taken. Behind an event: the stream is the caller's, and may go on.
bool DeviceLoad::wait_for_reads() {
  if (!has_reads_ || ended_) return true;
  auto event = worker_.device->make_event();
  if (!event || !worker_.stream->record(**event)) return false;
  const TimePoint give_up = SteadyClock().now() + kReadsPatience;
  for (;;) {
    const auto done = worker_.device->is_done(**event);
    if (done && *done) return true;
    if (!done || SteadyClock().now() >= give_up) {
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
  TRY(auto uploads, UploadFeed::create(*worker_.device, *worker_.stream, contents_,
                                       source_.segments, source_.bucket_bytes));
  TRY_VOID(uploads->mark_ready(tiles_.ready, tiles_.all));
  replace_nothing_more();
  feed_ = std::move(uploads);
  return {};
}

void DeviceLoad::replace_nothing_more() {
  ipc_ = nullptr;
  source_ = {};
  tiles_ = {};
}

Result<void> DeviceLoad::mark_ready(const Tiles& tiles) {
  if (ipc_ == nullptr) return feed_->mark_ready(tiles.ready, tiles.all);
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

Result<DeviceLoad::Prefetched> DeviceLoad::prefetch(std::uint64_t limit) {
  if (failed_) return fail(*failed_);
  auto taken = or_out_of_memory([this, limit] { return stash_one(limit); });
  if (!taken) failed_ = taken.error();
  return taken;
}

Result<DeviceLoad::Prefetched> DeviceLoad::stash_one(std::uint64_t limit) {
  if (holder_ != Holder::kNone || kept_ || feed_->ended() || stash_.bytes() >= limit) {
    return Prefetched::kNoMore;
  }
  TRY(auto bucket, poll_feed());
  if (!bucket) return feed_->ended() ? Prefetched::kNoMore : Prefetched::kNothingYet;
  TRY(const auto memory, worker_.device->memory());
  const std::uint64_t most = std::min(limit, (memory.free_bytes + stash_.bytes()) / 4);
  bool put = false;
  if (stash_.bytes() + bucket->bytes <= most) {
    TRY(put, stash_.put(*bucket));
  }
  if (!put) {
    kept_ = std::move(bucket);
    return Prefetched::kNoMore;
  }
  TRY_VOID(feed_->give_back());
  return Prefetched::kOne;
}

Result<std::optional<FilledBucket>> DeviceLoad::poll() {
  TRY_VOID(give_back());
  TRY(const bool let_go, stash_.let_go());
  TRY(auto bucket, next());
  if (bucket) {
    TRY_VOID(account(*bucket));
    return bucket;
  }
  if (!feed_->ended() || !let_go) return bucket;
  if (whole_ != missing_.size()) {
    return fail(ErrorCode::kInternal, "the buckets have ended, and {} of {} tensors are not whole",
                missing_.size() - whole_, missing_.size());
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
  auto polled = feed_->poll(SteadyClock().now());
  // Bytes that were found wrong on the device may be wrong in host memory, too. An agent that
  // verifies uploads allows none that it has not verified.
  const bool is_final = !polled && (polled.error().code() == ErrorCode::kCorrupt ||
                                    polled.error().code() == ErrorCode::kDenied);
  if (!polled && !is_final && ipc_ != nullptr && ipc_->untouched()) {
    const Error why = polled.error();
    if (auto ok = upload(why.message()); !ok) {
      return fail(std::move(ok).error().with_context(fmt::format("upload ({})", why.message())));
    }
    polled = feed_->poll(SteadyClock().now());
  }
  if (polled && *polled) {
    has_reads_ = true;
    replace_nothing_more();
  }
  return polled;
}

// What a feed says is checked before it becomes addresses.
Result<void> DeviceLoad::account(const FilledBucket& bucket) {
  for (const bucket::Part& part : bucket.parts) {
    const bool known = part.piece < missing_.size();
    const std::uint64_t size = known ? contents_.pieces()[part.piece].bytes : 0;
    const std::uint64_t counts = size == 0 ? 1 : part.bytes;
    if (!known || (part.bytes == 0) != (size == 0) || part.offset_bytes > size ||
        part.bytes > size - part.offset_bytes || part.at % bucket::kPartAlignment != 0 ||
        part.at > bucket.bytes || part.bytes > bucket.bytes - part.at ||
        counts > missing_[part.piece]) {
      return fail(ErrorCode::kInternal,
                  "a bucket has bytes that do not fit: {} at {} of tensor {}, at {} of {}",
                  part.bytes, part.offset_bytes, part.piece, part.at, bucket.bytes);
    }
    missing_[part.piece] -= counts;
    if (missing_[part.piece] == 0) ++whole_;
  }
  return {};
}

void DeviceLoad::wait(int wake, TimePoint deadline) const {
  if (!stash_.empty() || feed_->ended()) return poll_for(wake, -1, kEventPatience, deadline);
  wait_for_feed(wake, deadline);
}

void DeviceLoad::wait_for_feed(int wake, TimePoint deadline) const {
  poll_for(wake, feed_->fd(), feed_->patience(), deadline);
}

}  // namespace rekindle::client

#include "transport/verbs/memory/registered_region.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <thread>

#include "src/base/numa_nodes.h"
#include "src/base/units.h"
#include "transport/verbs/memory/page_touch.h"

namespace rekindle::transport::verbs {
namespace {

constexpr std::uint64_t kAlignment = 2 * kMiB;    // of borders: huge pages stay whole
constexpr std::uint64_t kTouchBytes = 16 * kMiB;  // between two looks at stopped()
constexpr unsigned kMaxUnexplained = 2;           // in a row; then the others fail like them
// Deregistering unpins page by page. From this size on it is worth a thread per device.
constexpr std::size_t kManyPieces = 8;

}  // namespace

Region::Region(std::span<const std::byte> bytes, MemoryUse use, int fd, std::uint64_t fd_offset,
               std::shared_ptr<const void> keep_alive,
               std::span<const std::unique_ptr<DeviceShare>> shares, const RegionPlan& plan)
    : memory_(bytes, fd, fd_offset), use_(use), keep_alive_(std::move(keep_alive)), plan_(plan) {
  make_strides();
  for (const auto& share : shares) {
    parts_.push_back(std::make_unique<Part>(*share, strides_.size()));
    parts_.back()->done = strides_.empty();
    // Its key would open the memory to the pullers of every other version.
    if (use == MemoryUse::kServe && !serves_by_windows(share->device) && !strides_.empty()) {
      parts_.back()->done = true;
      parts_.back()->missing_bytes[{Cause::kNoWindows, 0}] = bytes.size();
    }
  }
}

// Strides are the same for all devices, so that memory is faulted in once. Their borders are
// multiples of the alignment, except for smaller strides in tests.
void Region::make_strides() {
  const std::uint64_t size = memory_.bytes().size();
  stride_bytes_ = std::max<std::uint64_t>(plan_.max_piece_bytes, kPageBytes);
  const std::uint64_t alignment = std::min(kAlignment, std::bit_floor(stride_bytes_));
  stride_bytes_ -= stride_bytes_ % alignment;
  lead_ = reinterpret_cast<std::uint64_t>(memory_.bytes().data()) % alignment;
  std::uint64_t offset = 0;
  while (offset < size) {
    const std::uint64_t into = strides_.empty() ? lead_ : 0;
    Stride stride;
    stride.offset = offset;
    stride.bytes = std::min(stride_bytes_ - into, size - offset);
    offset += stride.bytes;
    strides_.push_back(std::move(stride));
  }
}

bool Region::advance(std::size_t device) {
  Part& part = *parts_[device];
  std::size_t stride = 0;
  if (!begin_step(part, stride)) return true;
  register_stride(part, stride);
  return end_step(part, stride + 1 == strides_.size());
}

bool Region::begin_step(Part& part, std::size_t& stride) {
  const std::lock_guard lock(mutex_);
  if (stopped_ || part.done) return false;
  part.working = true;
  stride = part.next_stride;
  return true;
}

bool Region::end_step(Part& part, bool last) {
  const std::lock_guard lock(mutex_);
  ++part.next_stride;
  part.working = false;
  part.done = last;
  changed_.notify_all();
  return last || stopped_;
}

void Region::stop() {
  {
    std::unique_lock lock(mutex_);
    stopped_ = true;
    // This waits for one registration at most: a worker checks stopped_ before its next piece.
    changed_.wait(lock, [this] {
      return std::none_of(parts_.begin(), parts_.end(), [](const auto& p) { return p->working; });
    });
  }
  const auto deregister = [](Part& part) {
    for (const auto& slots : part.owned) {
      for (std::size_t i = 0; i < slots->count; ++i) {
        Slot& slot = slots->slots[i];
        if (!slot.mr) continue;
        slot.mr.reset();
        part.share.give_back(slot.piece.bytes);
        part.share.pieces.fetch_sub(1);
      }
    }
    part.owned.clear();
  };
  if (parts_.size() > 1 && strides_.size() >= kManyPieces) {
    std::vector<std::thread> threads;
    for (const auto& part : parts_) threads.emplace_back([&] { deregister(*part); });
    for (std::thread& thread : threads) thread.join();
  } else {
    for (const auto& part : parts_) deregister(*part);
  }
  keep_alive_.reset();
}

int Region::touch(Stride& stride) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return stride.state != Stride::State::kTouching; });
  if (stride.state == Stride::State::kTouched) return stride.touch_error;
  stride.state = Stride::State::kTouching;
  lock.unlock();
  const TimePoint begin = SteadyClock().now();
  const int error = fault_in(stride);
  if (plan_.touching_ns != nullptr) *plan_.touching_ns += (SteadyClock().now() - begin).count();
  std::vector<int> nodes;
  if (error == 0 && plan_.several_nodes) {
    nodes = nodes_of_pages({memory_.latest() + stride.offset, stride.bytes}, kAlignment);
  }
  lock.lock();
  stride.touch_error = error;
  stride.nodes = std::move(nodes);
  stride.state = Stride::State::kTouched;
  changed_.notify_all();
  return error;
}

// Runs in parallel. Memory that devices only read is neither written nor marked as written.
int Region::fault_in(const Stride& stride) {
  const std::span<const std::byte> memory(memory_.latest() + stride.offset, stride.bytes);
  if (stride.offset == 0) advise_huge_pages(memory_.bytes(), memory_.fd());
  const TouchMode mode = use_ == MemoryUse::kLand ? TouchMode::kWrite : TouchMode::kRead;
  std::atomic<int> error = 0;
  const std::size_t chunks = (memory.size() + kTouchBytes - 1) / kTouchBytes;
  const auto touch_chunk = [&](std::size_t i) {
    if (stopped() || error.load() != 0) return;
    const std::size_t at = i * kTouchBytes;
    const int result = touch_pages(
        memory.subspan(at, std::min<std::size_t>(kTouchBytes, memory.size() - at)), mode);
    if (result != 0) error = result;
  };
  if (chunks == 1 || plan_.touchers == nullptr) {
    for (std::size_t i = 0; i < chunks; ++i) touch_chunk(i);
  } else {
    plan_.touchers->parallel_for(chunks, touch_chunk);
  }
  return error;
}

// `nodes`: as Stride::nodes; none: memory is not cut by them.
std::vector<Cut> Region::plan(const Stride& stride, const Part& part,
                              std::span<const int> nodes) const {
  const auto address = reinterpret_cast<std::uint64_t>(memory_.bytes().data()) + stride.offset;
  CutRules rules{.max_bytes = stride_bytes_, .alignment = kAlignment, .node_at = nullptr};
  const std::uint64_t device_max = part.share.device.limits().max_mr_bytes;
  if (device_max != 0) rules.max_bytes = std::min(rules.max_bytes, device_max);
  if (!nodes.empty()) {
    rules.node_at = [&](std::uint64_t at) {
      // The sample in the block that begins at `at`, also where samples are not on borders.
      const std::uint64_t block = (at - address + kAlignment - 1) / kAlignment;
      return nodes[std::min<std::size_t>(block, nodes.size() - 1)];
    };
  }
  std::vector<Cut> cuts = plan_pieces(address, stride.bytes, rules);
  for (Cut& cut : cuts) cut.offset += stride.offset;
  return cuts;
}

bool Region::hopeless(const Stride& stride, const Part& part) const {
  const Device& device = part.share.device;
  const std::uint64_t device_max = device.limits().max_mr_bytes;
  const std::uint64_t piece_bytes =
      device_max == 0 ? stride.bytes : std::min(stride.bytes, device_max);
  return device.dead() || piece_bytes >= part.too_large_bytes;
}

void Region::register_stride(Part& part, std::size_t index) {
  Stride& stride = strides_[index];
  // Another device's worker may have touched the stride. Its findings are visible only after our
  // own touch().
  const bool touched = !hopeless(stride, part);
  const int touch_error = touched ? touch(stride) : 0;
  const std::vector<Cut> cuts =
      plan(stride, part, touched ? std::span<const int>(stride.nodes) : std::span<const int>());
  auto slots = std::make_unique<Slots>(cuts.size());
  for (std::size_t i = 0; i < cuts.size(); ++i) {
    slots->slots[i].piece.offset = cuts[i].offset;
    slots->slots[i].piece.bytes = cuts[i].bytes;
  }
  part.strides[index].store(slots.get(), std::memory_order_release);
  part.owned.push_back(std::move(slots));
  const Slots& made = *part.owned.back();
  for (std::size_t i = 0; i < made.count && !stopped(); ++i) {
    register_slot(part, made.slots[i], touch_error);
  }
}

void Region::register_slot(Part& part, Slot& slot, int touch_error) {
  Piece& piece = slot.piece;
  DeviceShare& share = part.share;
  if (share.device.dead()) return note_failure(part, slot, Cause::kDeviceGone, 0, {});
  if (piece.bytes >= part.too_large_bytes) {
    return note_failure(part, slot, part.too_large_cause, part.too_large_error, part.lock);
  }
  if (touch_error == EFAULT && memory_.ends_before(piece.offset, piece.bytes)) {
    return note_failure(part, slot, Cause::kCutShort, touch_error, {});
  }
  if (!share.reserve(piece.bytes)) return refuse_rest(part, slot, Cause::kOwnLimit, 0);
  Registration made = register_memory(share, memory_, piece.offset, piece.bytes, use_);
  if (!made.mr) {
    share.give_back(piece.bytes);
    const Refusal refusal{.error = made.error,
                          .bytes = piece.bytes,
                          .registered = share.pieces.load(),
                          .max_mr = share.device.limits().max_mr,
                          .cut_short = memory_.ends_before(piece.offset, piece.bytes),
                          .no_writable_mapping = made.no_writable_mapping,
                          .lock = read_lock_limit()};
    const Cause cause = find_cause(refusal);
    part.unexplained = cause == Cause::kDeviceFull ? part.unexplained + 1 : 0;
    if (stops_the_rest(cause) || part.unexplained >= kMaxUnexplained) {
      return refuse_rest(part, slot, cause, made.error);
    }
    return note_failure(part, slot, cause, made.error, refusal.lock);
  }
  part.unexplained = 0;
  piece.address = reinterpret_cast<std::uint64_t>(made.address);
  piece.lkey = made.mr->lkey;
  piece.mr = made.mr.get();
  slot.mr = std::move(made.mr);
  share.pieces.fetch_add(1);
  slot.usable.store(true, std::memory_order_release);
  changes_.fetch_add(1, std::memory_order_acq_rel);
  const std::lock_guard lock(mutex_);
  part.registered_bytes += piece.bytes;
}

void Region::refuse_rest(Part& part, const Slot& slot, Cause cause, int error) {
  part.too_large_bytes = cause == Cause::kRegionCount ? 0 : slot.piece.bytes;
  part.too_large_cause = cause;
  part.too_large_error = error;
  note_failure(part, slot, cause, error, read_lock_limit());
}

void Region::note_failure(Part& part, const Slot& slot, Cause cause, int error,
                          const LockLimit& lock) {
  part.share.failures.fetch_add(1);
  const std::lock_guard guard(mutex_);
  part.missing_bytes[{cause, error}] += slot.piece.bytes;
  part.lock = lock;
}

const Piece* Region::find(std::size_t device, std::uint64_t offset) const {
  if (device >= parts_.size() || offset >= memory_.bytes().size()) return nullptr;
  const Slots* const made =
      parts_[device]->strides[stride_of(offset)].load(std::memory_order_acquire);
  if (made == nullptr) return nullptr;
  const Slot* const begin = made->slots.get();
  const Slot* const after =
      std::upper_bound(begin, begin + made->count, offset,
                       [](std::uint64_t at, const Slot& slot) { return at < slot.piece.offset; });
  const Slot& slot = *(after - 1);
  return slot.usable.load(std::memory_order_acquire) ? &slot.piece : nullptr;
}

std::vector<Piece> Region::pieces(std::size_t device) const {
  std::vector<Piece> pieces;
  if (device >= parts_.size()) return pieces;
  for (const auto& stride : parts_[device]->strides) {
    const Slots* const made = stride.load(std::memory_order_acquire);
    for (std::size_t i = 0; made != nullptr && i < made->count; ++i) {
      const Slot& slot = made->slots[i];
      if (slot.usable.load(std::memory_order_acquire)) pieces.push_back(slot.piece);
    }
  }
  return pieces;
}

bool Region::all_done() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->done; });
}

bool Region::settled() const {
  const std::lock_guard lock(mutex_);
  return all_done();
}

bool Region::wait_settled(TimePoint deadline) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [this] { return all_done(); });
}

std::vector<Error> Region::problems() const {
  const std::lock_guard guard(mutex_);
  std::vector<Error> errors;
  for (const auto& part : parts_) {
    const Device& device = part->share.device;
    for (const auto& [why, bytes] : part->missing_bytes) {
      errors.push_back(to_error({.cause = why.first,
                                 .error = why.second,
                                 .device = device.name(),
                                 .devices = parts_.size(),
                                 .region_bytes = memory_.bytes().size(),
                                 .registered_bytes = part->registered_bytes,
                                 .missing_bytes = bytes,
                                 .own_limit_bytes = part->share.limit_bytes,
                                 .max_mr = device.limits().max_mr,
                                 .lock = part->lock}));
    }
  }
  return errors;
}

namespace {

constexpr int kUnknownNode = -1;

// A region may end at the end of the address space. So an offset is compared with the rest before
// it grows. Addresses may wrap, which does not change their remainder by a power of two.
std::uint64_t past_border(std::uint64_t address, std::uint64_t alignment) {
  return address & (alignment - 1);
}

// The end of the run of blocks on one node that begins at `offset`.
std::uint64_t run_end(std::uint64_t address, std::uint64_t bytes, std::uint64_t offset,
                      std::uint64_t alignment, const CutRules& rules) {
  if (!rules.node_at) return bytes;
  int run_node = rules.node_at(address + offset);
  while (true) {
    const std::uint64_t block = alignment - past_border(address + offset, alignment);
    if (block >= bytes - offset) return bytes;
    const int node = rules.node_at(address + offset + block);
    if (node != kUnknownNode && run_node != kUnknownNode && node != run_node) return offset + block;
    if (run_node == kUnknownNode) run_node = node;
    offset += block;
  }
}

}  // namespace

std::vector<Cut> plan_pieces(std::uint64_t address, std::uint64_t bytes, const CutRules& rules) {
  const std::uint64_t max_bytes = std::max<std::uint64_t>(rules.max_bytes, 1);
  const std::uint64_t alignment = std::bit_floor(std::max<std::uint64_t>(rules.alignment, 1));
  // Pieces that are smaller than the alignment are as aligned as their size allows.
  const std::uint64_t fine = std::min(alignment, std::bit_floor(max_bytes));
  std::vector<Cut> cuts;
  std::uint64_t offset = 0;
  while (offset < bytes) {
    const std::uint64_t end = run_end(address, bytes, offset, alignment, rules);
    while (offset < end) {
      std::uint64_t take = std::min(max_bytes, end - offset);
      if (take < end - offset) {
        const std::uint64_t over = past_border(address + offset + take, fine);
        if (over < take) take -= over;
      }
      cuts.push_back({offset, take});
      offset += take;
    }
  }
  return cuts;
}

}  // namespace rekindle::transport::verbs

#include "transport/verbs/staged/stage_end.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <thread>
#include <utility>

#include "src/base/log.h"
#include "src/store/fault_guard.h"
#include "transport/read_op.h"

namespace rekindle::transport::verbs {
namespace {

constexpr int kKindShift = 32;
constexpr std::chrono::milliseconds kStageBindDeadline{1000};
constexpr std::chrono::milliseconds kStageInvalidateDeadline{200};
constexpr auto kStageNap = std::chrono::microseconds(50);

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Null where windows keep links apart, or the device has no more.
PdHandle own_domain(const Device& device) {
  if (device.limits().memory_windows_2b) return {nullptr, {&device.api()}};
  return {device.api().alloc_pd(device.context()), {&device.api()}};
}

}  // namespace

StageEnd::StageEnd(PdHandle domain, std::unique_ptr<Connection> connection, const Session& session,
                   const SegmentRegistry& registry, StagePool& pool, std::uint32_t puller_rail)
    : token_(session.token),
      puller_(session.puller),
      puller_rail_(puller_rail),
      registry_(registry),
      pool_(pool),
      domain_(std::move(domain)),
      connection_(std::move(connection)),
      last_request_ns_(now_ns()) {}

// --- the handshake

Result<std::shared_ptr<StageEnd>> StageEnd::create(Rail& rail, const LinkRequest& request,
                                                   const Session& session,
                                                   const SegmentRegistry& registry,
                                                   StagePool& pool) {
  if (request.stage_blocks == 0) {
    return fail(ErrorCode::kUnavailable, "the puller cannot read staged blocks");
  }
  if (pool.size() == 0) return fail(ErrorCode::kExhausted, "{}: {}", rail.name(), pool.problem());
  const auto blocks = pool.acquire(std::min<std::size_t>(request.stage_blocks, kMaxStageBlocks));
  if (blocks.empty()) {
    return fail(ErrorCode::kExhausted, "{}: all {} staging blocks are in use: try again later",
                rail.name(), pool.size());
  }
  ConnectionOptions options;
  options.queue_pairs = 1;
  // An answer and a change of its window for each block.
  options.send_depth = static_cast<std::uint32_t>(2 * blocks.size());
  options.recv_depth = static_cast<std::uint32_t>(blocks.size());
  PdHandle domain = own_domain(rail.device());
  options.domain = domain.get();
  auto connection = Connection::create(rail, options);
  if (!connection) {
    pool.release(blocks);
    return fail(std::move(connection).error());
  }
  // From here on its destructor gives the blocks back.
  std::shared_ptr<StageEnd> end(new StageEnd(std::move(domain), std::move(*connection), session,
                                             registry, pool, request.puller_rail.index));
  for (const StageBlock& block : blocks) end->slots_.emplace_back().block = block;
  TRY_VOID(end->open(request));
  return end;
}

Result<void> StageEnd::open(const LinkRequest& request) {
  const std::lock_guard lock(mutex_);
  const Rail& rail = connection_->rail();
  const bool windows = rail.device().limits().memory_windows_2b;
  if (!windows) TRY_VOID(register_in_domain());
  // The puller may ask before the answer to its handshake has left.
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (post_receive(i)) continue;
    return fail(ErrorCode::kUnavailable, "{}: post a receive to a queue pair", rail.name());
  }
  RemoteEnd remote;
  remote.address = request.puller_rail.address;
  remote.mtu_bytes = std::min(request.mtu_bytes, connection_->mtu_bytes());
  remote.rd_atomic = std::min(request.rd_atomic, rail.device().limits().max_rd_atomic);
  remote.queue_pairs = {request.queue_pairs.front()};
  TRY_VOID(connection_->connect(remote, ConnectionRole::kServes));
  if (windows) TRY_VOID(bind_windows());

  response_.mtu_bytes = remote.mtu_bytes;
  response_.rd_atomic = remote.rd_atomic;
  response_.queue_pairs = connection_->ends();
  StageOffer& offer = response_.stage.emplace();
  offer.block_bytes = pool_.block_bytes();
  for (const Slot& slot : slots_) {
    offer.blocks.push_back({reinterpret_cast<std::uint64_t>(slot.block.data),
                            slot.window ? slot.window.key() : slot.mr()->rkey});
  }
  connection_->arm();
  armed_ = true;
  return {};
}

Result<void> StageEnd::register_in_domain() {
  const Rail& rail = connection_->rail();
  if (!domain_) {
    return fail(ErrorCode::kExhausted, "{}: the NIC has no protection domain left", rail.name());
  }
  for (Slot& slot : slots_) {
    errno = 0;
    slot.in_domain =
        MrHandle(connection_->api().reg_mr(domain_.get(), slot.block.data, pool_.step_bytes(),
                                           IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ),
                 {&connection_->api()});
    if (slot.in_domain) continue;
    return fail(ErrorCode::kExhausted, "{}: register a staging block: {}", rail.name(),
                std::strerror(errno));
  }
  return {};
}

Result<void> StageEnd::bind_windows() {
  const Rail& rail = connection_->rail();
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    auto window = MemoryWindow::allocate(rail.device());
    if (!window) {
      return fail(window.error().code(), "{}: no memory window left for a staging block: {}",
                  rail.name(), window.error().message());
    }
    slot.window = std::move(*window);
    ibv_send_wr request = slot.window.binding(
        slot.block.mr, reinterpret_cast<std::uint64_t>(slot.block.data), pool_.block_bytes());
    if (const int error = post(Kind::kBind, i, request); error != 0) {
      return fail(ErrorCode::kUnavailable, "{}: bind a memory window: {}", rail.name(),
                  std::strerror(error));
    }
  }
  if (await_requests(std::chrono::steady_clock::now() + kStageBindDeadline) && !bind_failed_)
    return {};
  return fail(ErrorCode::kUnavailable, "{}: the NIC binds no memory windows", rail.name());
}

// --- requests

bool StageEnd::post_receive(std::size_t slot) {
  const StageBlock& block = slots_[slot].block;
  ibv_sge sge{reinterpret_cast<std::uint64_t>(block.received), kStageMessageBytes,
              slots_[slot].mr()->lkey};
  ibv_recv_wr request{};
  request.wr_id = std::uint64_t{static_cast<std::uint32_t>(Kind::kReceive)} << kKindShift | slot;
  request.sg_list = &sge;
  request.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  return connection_->api().post_recv(connection_->queue_pair(0), &request, &bad) == 0;
}

int StageEnd::post(Kind kind, std::size_t slot, ibv_send_wr& request) {
  request.wr_id = std::uint64_t{static_cast<std::uint32_t>(kind)} << kKindShift | slot;
  request.send_flags = IBV_SEND_SIGNALED;
  ibv_send_wr* bad = nullptr;
  const int error = connection_->api().post_send(connection_->queue_pair(0), &request, &bad);
  if (error == 0) ++outstanding_;
  return error;
}

// Returns how many. Negative: the completion queue is broken.
int StageEnd::poll_completions() {
  std::array<ibv_wc, 2 * kMaxStageBlocks> completions;
  const int count = connection_->api().poll_cq(
      connection_->cq(), static_cast<int>(completions.size()), completions.data());
  for (int i = 0; i < count; ++i) complete(completions[static_cast<std::size_t>(i)]);
  return count;
}

bool StageEnd::await_requests(TimePoint deadline) {
  while (outstanding_ > 0) {
    const int count = poll_completions();
    if (count > 0) continue;
    if (count < 0 || std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kStageNap);
  }
  return true;
}

void StageEnd::complete(const ibv_wc& wc) {
  const auto kind = static_cast<Kind>(wc.wr_id >> kKindShift);
  const auto index = static_cast<std::size_t>(wc.wr_id & 0xffff'ffff);
  if (index >= slots_.size()) return;
  if (kind != Kind::kReceive && outstanding_ > 0) --outstanding_;
  if (kind == Kind::kAnswer) slots_[index].answering = false;
  if (kind == Kind::kBind && wc.status != IBV_WC_SUCCESS) bind_failed_ = true;
  if (wc.status == IBV_WC_SUCCESS) {
    WindowCounts& counts = connection_->rail().device().windows();
    if (kind == Kind::kBind) ++counts.bound;
    if (kind == Kind::kInvalidate) ++counts.invalidated;
  }
  if (wc.status != IBV_WC_SUCCESS) {
    break_off(ibv_wc_status_str(wc.status));
  } else if (kind == Kind::kReceive) {
    take_request(index, wc.byte_len);
  }
}

void StageEnd::take_request(std::size_t slot, std::size_t bytes) {
  if (ended_) return;
  // The message is copied out of the NIC's reach, so that the checked bytes are the used ones.
  std::array<std::byte, kStageMessageBytes> message;
  std::memcpy(message.data(), slots_[slot].block.received, message.size());
  const auto request =
      parse_stage_request(StageBytes(message).first(std::min(bytes, message.size())),
                          {slots_.size(), pool_.block_bytes()});
  if (!request) return break_off(request.error().message());
  Slot& asked = slots_[request->slot];
  if (asked.asked) return break_off("it asks for a block twice");
  if (!post_receive(slot)) return break_off("post a receive");
  asked.asked = true;
  asked.request = *request;
  last_request_ns_.store(now_ns(), std::memory_order_relaxed);
}

// --- the staging thread

StageEnd::Turn StageEnd::turn() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || revoked_ || ended_) return Turn::kOver;
  while (connection_->take_event()) armed_ = false;
  const int count = poll_completions();
  if (count < 0) break_off("the completion queue is broken");
  const bool served = !ended_ && serve_one();
  if (ended_) return Turn::kOver;
  if (served || count > 0) return Turn::kMore;
  if (armed_) return Turn::kIdle;
  // Completions that came before the arming raise no event: look once more.
  connection_->arm();
  armed_ = true;
  return Turn::kMore;
}

bool StageEnd::serve_one() {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const std::size_t index = (next_slot_ + i) % slots_.size();
    Slot& slot = slots_[index];
    if (!slot.asked || slot.answering) continue;
    next_slot_ = index + 1;
    serve(slot, index);
    return true;
  }
  return false;
}

void StageEnd::serve(Slot& slot, std::size_t index) {
  slot.asked = false;
  const OpStatus status = gather(slot.request, slot.block.data);
  const bool good = status == OpStatus::kOk;
  const StageAnswer answer{slot.request.slot, slot.request.sequence, status,
                           good ? static_cast<std::uint32_t>(slot.request.total_bytes()) : 0};
  const std::size_t bytes = encode(answer, {slot.block.sent, kStageMessageBytes});
  ibv_sge sge{reinterpret_cast<std::uint64_t>(slot.block.sent), static_cast<std::uint32_t>(bytes),
              slot.mr()->lkey};
  ibv_send_wr request{};
  request.opcode = IBV_WR_SEND;
  request.sg_list = &sge;
  request.num_sge = 1;
  const int error = post(Kind::kAnswer, index, request);
  if (error != 0) return break_off(fmt::format("post: {}", std::strerror(error)));
  slot.answering = true;
}

OpStatus StageEnd::gather(const StageRequest& request, std::byte* block) const {
  const auto region = registry_.lookup(token_, request.region);
  if (!region) {
    return region.error().code() == ErrorCode::kStale ? OpStatus::kStale : OpStatus::kDenied;
  }
  const StridedRange range{request.offset, request.run_bytes, request.count, request.stride};
  if (!fits(range, (*region)->bytes.size())) return OpStatus::kInvalid;
  const std::byte* const from = (*region)->bytes.data() + request.offset;
  const auto copy = [&] {
    for (std::uint32_t run = 0; run < request.count; ++run) {
      std::memcpy(block + std::size_t{run} * request.run_bytes, from + run * request.stride,
                  request.run_bytes);
    }
  };
  // std::cref: a copy of the function would be allocated.
  const auto copied = store::guard_mapping_access("a staged region", std::cref(copy));
  return copied ? OpStatus::kOk : OpStatus::kFault;
}

Duration StageEnd::idle() const {
  return std::chrono::nanoseconds(now_ns() - last_request_ns_.load(std::memory_order_relaxed));
}

bool StageEnd::replaced_by(const Session& session, const Rail& other,
                           const LinkRequest& request) const {
  return session.token == token_ && &other == &rail() && request.puller_rail.index == puller_rail_;
}

// --- the end

void StageEnd::end(std::string_view why) {
  const std::lock_guard lock(mutex_);
  break_off(why);
}

// The sweeper revokes it. This thread serves all devices, so it touches no queue pair.
void StageEnd::break_off(std::string_view why) {
  if (revoked_ || ended_.exchange(true)) return;
  log::info("verbs.staged_link_ended", "rail", connection_->rail().name(), "puller", puller_, "why",
            why);
}

bool StageEnd::begin_revoke() {
  const std::lock_guard lock(mutex_);
  return !std::exchange(revoked_, true);
}

void StageEnd::post_invalidations() {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].window) continue;
    ibv_send_wr request = slots_[i].window.invalidation();
    if (post(Kind::kInvalidate, i, request) != 0) return;  // the queue pair is down already
  }
}

void StageEnd::stop(TimePoint deadline) {
  const std::lock_guard lock(mutex_);
  (void)await_requests(deadline);
  connection_->stop();
}

// The blocks are returned when nothing reaches them any more.
void StageEnd::release(TimePoint deadline) {
  const std::lock_guard lock(mutex_);
  (void)await_requests(deadline);
  for (Slot& slot : slots_) slot.window.deallocate();
  // Closed here, since the thread that serves all devices may release the last reference.
  connection_->close();
  std::vector<StageBlock> blocks;
  for (const Slot& slot : slots_) blocks.push_back(slot.block);
  slots_.clear();
  domain_.reset();
  pool_.release(blocks);
}

StageEnd::~StageEnd() {
  if (!begin_revoke()) return;
  const TimePoint deadline = std::chrono::steady_clock::now() + kStageInvalidateDeadline;
  stop(deadline);
  release(deadline);
}

}  // namespace rekindle::transport::verbs

#include "src/client/session.h"

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include <sys/eventfd.h>
#include <unistd.h>

#include "src/base/units.h"

namespace rekindle::client {

namespace {

constexpr std::chrono::milliseconds kAgentPatience{1000};

// Takes the descriptors.
DeviceLoad::Source source_of(const AttachedReply& attached, std::vector<UniqueFd>& descriptors,
                             std::uint64_t bucket_bytes) {
  DeviceLoad::Source source{{}, {}, attached.no_device_channel, bucket_bytes};
  if (attached.device_channel && !descriptors.empty()) {
    source.channel = std::move(descriptors.back());
    descriptors.pop_back();
  }
  source.segments = {std::move(descriptors), attached.segment_bytes};
  return source;
}

}  // namespace

Result<std::shared_ptr<Session>> Session::attach(std::shared_ptr<Connection> connection,
                                                 const AttachRequest& request,
                                                 std::chrono::milliseconds timeout,
                                                 std::optional<WorkerDevice> device) {
  if (!request.resident_key.empty() && !connection->keeps_residents()) {
    return fail(ErrorCode::kUnavailable,
                "the agent keeps no resident copies: it is older, or has --resident-ttl 0");
  }
  const auto inbox = std::make_shared<Inbox>();
  if (device) {
    inbox->wake = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!inbox->wake) return fail_errno(errno, "create an eventfd");
  }
  TRY(Message answer, connection->call(request, 0, timeout, inbox));
  auto* const attached = std::get_if<AttachedReply>(&answer.agent.reply);
  if (attached == nullptr) {
    return fail(ErrorCode::kInternal, "the agent answered an attach with something else");
  }
  const std::uint64_t id = answer.agent.session;
  ResidentCopy resident;
  const bool is_resident = !attached->resident.block_bytes.empty();
  if (is_resident) {
    resident = {std::move(attached->resident.description),
                std::move(attached->resident.block_bytes), std::move(answer.descriptors),
                attached->resident.shared};
    answer.descriptors.clear();
  }
  // With a device, the segments are mapped where they are uploaded, if this process does that.
  Result<std::vector<Mapping>> segments;
  if (!device) segments = map_segments(answer.descriptors, attached->segment_bytes, false);
  DeviceLoad::Source source = source_of(*attached, answer.descriptors, request.bucket_bytes);
  Unread unread{std::move(answer.frame), attached->tensor_set, attached->layout,
                std::move(attached->wanted), std::move(attached->segment_bytes)};
  const auto count = unread.count();
  if (is_resident == request.resident_key.empty()) {
    segments = fail(ErrorCode::kInternal, "the agent's answer does not fit the attach");
  }
  if (!count || !segments) {
    connection->forget_session(id, inbox);
    (void)connection->send(DetachRequest{}, id, kNoDeadline, nullptr);
    return fail(count ? std::move(segments).error() : count.error());
  }
  SessionState state(std::move(*attached), device.has_value() && !is_resident);
  std::shared_ptr<Session> session(new Session(std::move(connection), inbox, id, std::move(state),
                                               std::move(*segments), std::move(unread), *count));
  session->device_name_ = request.device;
  session->resident_ = std::move(resident);
  if (device && !is_resident) {
    TRY_VOID(session->begin_device(std::move(*device), std::move(source)));
  } else {
    TRY_VOID(session->contents());
  }
  const Lock lock(inbox->mutex);
  TRY_VOID(session->state_.check_alive());
  return session;
}

Session::Session(std::shared_ptr<Connection> connection, std::shared_ptr<Inbox> inbox,
                 std::uint64_t id, SessionState state, std::vector<Mapping> segments, Unread unread,
                 std::size_t count)
    : connection_(std::move(connection)),
      inbox_(std::move(inbox)),
      id_(id),
      count_(count),
      unread_(std::move(unread)),
      host_(std::in_place, std::move(segments)),
      state_(std::move(state)) {}

Session::~Session() {
  connection_->forget_session(id_, inbox_);
  device_.reset();
  host_.reset();
  (void)connection_->send(DetachRequest{}, id_, kNoDeadline, nullptr);
}

Result<std::size_t> Session::Unread::count() const {
  if (!wanted.empty()) return wanted.size();
  auto entries = Layout::count_entries(layout);
  if (entries) return entries;
  return fail(ErrorCode::kInternal, "the agent's answer does not fit together: {}",
              entries.error().message());
}

Result<bucket::Contents> Session::Unread::read() const {
  return bucket::Contents::create(tensor_set, layout, wanted, segment_bytes);
}

Result<const bucket::Contents*> Session::contents() {
  const std::lock_guard once(reading_);
  if (unread_) {
    auto read = unread_->read();
    unread_.reset();
    const Lock lock(inbox_->mutex);
    if (read) {
      state_.describe(std::move(*read));
    } else {
      state_.end(std::move(read).error());
      inbox_->notify();
    }
  }
  const Lock lock(inbox_->mutex);
  if (state_.is_described()) return &state_.contents();
  TRY_VOID(state_.check_alive());
  return fail(ErrorCode::kInternal, "the session has no list of tensors");
}

void Session::end() {
  {
    const Lock lock(inbox_->mutex);
    state_.end(Error(ErrorCode::kStale, "the session was detached"));
  }
  inbox_->notify();
}

void Session::apply_messages() {
  if (inbox_->messages.empty() && (!inbox_->closed || state_.ended())) return;
  while (!inbox_->messages.empty()) {
    AgentMessage message = std::move(inbox_->messages.front().agent);
    inbox_->messages.pop_front();
    state_.apply(std::move(message));
  }
  if (inbox_->closed && !state_.ended()) state_.end(*inbox_->closed);
  // Other threads may wait for a message that this one applied.
  inbox_->notify();
}

Result<void> Session::wait_for_turn(Lock& lock, TimePoint deadline) {
  const Turns::Waiting waiting(turns_);
  // A prefetch gives way.
  if (turns_.taken()) inbox_->notify();
  TRY(const bool mine, wait(lock, deadline, [this] { return !turns_.taken(); }));
  if (!mine) return fail(ErrorCode::kTimeout, "another thread is waiting for tensors");
  return {};
}

// --- tensors in host memory

Result<std::span<const rk_tensor>> Session::next(TimePoint deadline) {
  if (device_ != nullptr) {
    return fail(ErrorCode::kInvalid,
                "this session's tensors come on {}: call rk_next_bucket or rk_load_into",
                device_->id());
  }
  Lock lock(inbox_->mutex);
  TRY_VOID(wait_for_turn(lock, deadline));
  const Turns::Turn turn(turns_, *inbox_);
  TRY(const bool some,
      wait(lock, deadline, [&] { return !state_.complete().empty() || handed_out_ == count_; }));
  if (!some) {
    return fail(ErrorCode::kTimeout, "no further tensor of {} yet: {} of {} are here",
                state_.version().to_string(), handed_out_, count_);
  }
  if (state_.complete().empty()) return std::span<const rk_tensor>();
  return hand_out(lock);
}

// Pieces that could not be handed out stay complete for the next call.
Result<std::span<const rk_tensor>> Session::hand_out(Lock& lock) {
  const std::vector<std::size_t> pieces = state_.complete();
  Result<std::vector<rk_tensor>> tensors;
  {
    const Unlocked unlocked(lock);
    tensors = host_->make(state_.contents(), pieces);
  }
  if (!tensors) return fail(std::move(tensors).error());
  TRY_VOID(state_.check_alive());
  batches_.push_back(std::move(*tensors));
  state_.handed_out(pieces.size());
  handed_out_ += pieces.size();
  return std::span<const rk_tensor>(batches_.back());
}

Result<std::span<const rk_tensor>> Session::tensors() {
  TRY(const auto* const all, contents());
  const Lock lock(inbox_->mutex);
  if (tensors_.empty()) tensors_ = describe_pieces(*all);
  return tensors_;
}

Result<std::span<const rk_tensor>> Session::catalog() {
  TRY(const auto* const all, contents());
  const Lock lock(inbox_->mutex);
  if (catalog_.empty()) catalog_ = describe_version(*all);
  return catalog_;
}

// --- buckets on a device

Result<void> Session::begin_device(WorkerDevice device, DeviceLoad::Source source) {
  TRY(auto load, DeviceLoad::create(
                     std::move(device), [this] { return contents(); }, std::move(source)));
  const Lock lock(inbox_->mutex);
  device_ = std::move(load);
  device_path_ = state_.intern(device_->path());
  return {};
}

Result<void> Session::check_has_device() const {
  if (device_ != nullptr) return {};
  if (resident()) {
    return fail(ErrorCode::kInvalid,
                "this session's weights are in a resident copy: map it with rk_resident_open");
  }
  return fail(ErrorCode::kInvalid, "this session was attached without a device: call rk_next");
}

Result<std::span<const rk_part>> Session::next_bucket(TimePoint deadline) {
  // Nothing comes: the weights are in the blocks.
  if (resident()) return std::span<const rk_part>();
  TRY_VOID(check_has_device());
  TRY_VOID(tensors());
  Lock lock(inbox_->mutex);
  TRY_VOID(wait_for_turn(lock, deadline));
  const Turns::Turn turn(turns_, *inbox_);
  TRY(const auto bucket, take_bucket(lock, deadline));
  if (!bucket) return std::span<const rk_part>();
  try {
    return hand_out(*bucket);
  } catch (const std::bad_alloc&) {
    // The next call would skip the bucket, so the session ends.
    Error error(ErrorCode::kExhausted, "out of memory");
    state_.end(error);
    return fail(std::move(error));
  }
}

std::span<const rk_part> Session::hand_out(const FilledBucket& bucket) {
  std::vector<rk_part> parts;
  parts.reserve(bucket.parts.size());
  for (const bucket::Part& part : bucket.parts) {
    parts.push_back({&tensors_[part.piece],
                     part.offset_bytes,
                     part.bytes,
                     reinterpret_cast<void*>(static_cast<std::uintptr_t>(bucket.at + part.at)),
                     {}});
  }
  parts_.push_back(std::move(parts));
  return parts_.back();
}

// Runs `call` on the device without the mutex, after the device has heard of the tiles that have
// verified. Asks the agent when the device process seems to be gone.
template <typename Call>
auto Session::on_device(Lock& lock, Call call) -> decltype(call()) {
  apply_messages();
  TRY_VOID(state_.check_alive());
  const VerifiedTiles verified = state_.take_verified();
  const auto run = [&]() -> decltype(call()) {
    const Unlocked unlocked(lock);
    TRY_VOID(device_->mark_ready(verified));
    return call();
  };
  auto result = run();
  handed_out_ = device_->whole_pieces();
  device_path_ = state_.intern(device_->path());
  if (!result) ask_agent(lock, result.error());
  TRY_VOID(state_.check_alive());
  return result;
}

// nullopt: there are no more.
Result<std::optional<FilledBucket>> Session::take_bucket(Lock& lock, TimePoint deadline) {
  while (true) {
    auto bucket = on_device(lock, [this] { return device_->take(); });
    if (!bucket || *bucket || device_->ended()) return bucket;
    if (steady_now() >= deadline) {
      return fail(ErrorCode::kTimeout, "no further bucket of {} yet: {} of {} tensors are whole",
                  state_.version().to_string(), handed_out_, count_);
    }
    wait_for_device(lock, deadline, &DeviceLoad::wait);
  }
}

void Session::wait_for_device(Lock& lock, TimePoint deadline,
                              void (DeviceLoad::*until)(int, TimePoint) const) {
  const Unlocked unlocked(lock);
  (device_.get()->*until)(inbox_->wake.get(), deadline);
  std::uint64_t count;
  [[maybe_unused]] const ssize_t got = ::read(inbox_->wake.get(), &count, sizeof count);
}

// An agent that dies takes its device process with it, and the end of either may show first. If the
// agent is gone, that is the reason; an agent that lives answers.
void Session::ask_agent(Lock& lock, const Error& device_error) {
  if (device_error.code() != ErrorCode::kUnavailable) return;
  Result<Message> answer;
  {
    const Unlocked unlocked(lock);
    answer = connection_->call(PingRequest{}, 0, kAgentPatience, std::make_shared<Inbox>());
  }
  if (answer || answer.error().code() != ErrorCode::kPeerLost || state_.ended()) return;
  state_.end(answer.error());
}

Result<void> Session::prefetch(std::uint64_t bytes, TimePoint deadline) {
  using Stashed = DeviceLoad::Stashed;
  TRY_VOID(check_has_device());
  Lock lock(inbox_->mutex);
  TRY_VOID(wait_for_turn(lock, deadline));
  const Turns::Turn turn(turns_, *inbox_);
  while (!turns_.somebody_waits()) {
    TRY(const auto taken, on_device(lock, [&] { return device_->prefetch(bytes); }));
    const bool ends = taken == Stashed::kNoMore || taken == Stashed::kNoRoom;
    if (ends || steady_now() >= deadline) break;
    if (taken == Stashed::kNothingYet) {
      wait_for_device(lock, deadline, &DeviceLoad::wait_for_feed);
    }
  }
  return {};
}

// The whole session must fit before the first bucket is taken. The rest of the process may take
// memory meanwhile, so the device looks again at each bucket.
Result<void> Session::check_room(Lock& lock, std::uint64_t reserve) {
  TRY(const std::uint64_t free, on_device(lock, [this] { return device_->free_bytes(); }));
  const std::uint64_t total = state_.contents().total_bytes();
  const std::uint64_t left = total - std::min(total, device_->staged_bytes());
  if (left == 0 || (left <= free && free - left >= reserve)) return {};
  return fail(ErrorCode::kExhausted,
              "no room to stage {} beside what serves: it needs {} more on {}, {} are free there "
              "and {} of them stay free; load it without staging, or lower the reserve",
              state_.version().to_string(), format_bytes(left), device_->id(), format_bytes(free),
              format_bytes(reserve));
}

Result<void> Session::stage(std::uint64_t reserve, std::chrono::milliseconds timeout) {
  using Stashed = DeviceLoad::Stashed;
  TRY_VOID(check_has_device());
  TRY_VOID(contents());
  Lock lock(inbox_->mutex);
  TimePoint deadline = steady_now() + timeout;
  TRY_VOID(wait_for_turn(lock, deadline));
  const Turns::Turn turn(turns_, *inbox_);
  if (device_->is_read()) {
    return fail(ErrorCode::kInvalid,
                "cannot stage {}: a bucket of it is still read; stage it before its first bucket "
                "is taken, or take the other buckets as they come",
                state_.version().to_string());
  }
  while (true) {
    TRY_VOID(check_room(lock, reserve));
    if (steady_now() >= deadline) {
      return fail(ErrorCode::kTimeout, "no further bucket of {} yet: {} are staged",
                  state_.version().to_string(), format_bytes(device_->staged_bytes()));
    }
    TRY(const auto taken, on_device(lock, [&] { return device_->stage(reserve); }));
    if (taken == Stashed::kNoMore) return {};
    if (taken == Stashed::kNoRoom) {
      return fail(
          ErrorCode::kExhausted,
          "no room to stage {} beside what serves: with {} of it there, {} has less than {} "
          "free; load it without staging, or lower the reserve",
          state_.version().to_string(), format_bytes(device_->staged_bytes()), device_->id(),
          format_bytes(reserve));
    }
    if (taken == Stashed::kOne) {
      deadline = steady_now() + timeout;
    } else {
      wait_for_device(lock, deadline, &DeviceLoad::wait_for_feed);
    }
  }
}

Result<void> Session::load_into(std::span<const rk_target> targets,
                                std::chrono::milliseconds timeout) {
  TRY_VOID(check_has_device());
  TRY_VOID(contents());
  Lock lock(inbox_->mutex);
  TRY_VOID(wait_for_turn(lock, steady_now() + timeout));
  const Turns::Turn turn(turns_, *inbox_);
  {
    const Unlocked unlocked(lock);
    TRY_VOID(device_->aim(targets));
  }
  auto moved = move_all(lock, timeout);
  if (moved || moved.error().code() == ErrorCode::kTimeout) return moved;
  const Unlocked unlocked(lock);
  // After this the caller may reuse the targets.
  if (device_->wait_for_reads()) return moved;
  return fail(moved.error().code(), "{}; the device still copies to the targets: keep them",
              moved.error().message());
}

Result<void> Session::move_all(Lock& lock, std::chrono::milliseconds timeout) {
  while (true) {
    TRY(const auto bucket, take_bucket(lock, steady_now() + timeout));
    // The last bucket is given back only after the device has read it.
    if (!bucket) return {};
    const Unlocked unlocked(lock);
    TRY_VOID(device_->move(*bucket));
  }
}

// --- resident copies

Result<std::shared_ptr<bucket::Device>> Session::block_device() {
  if (device_name_.empty()) {
    return fail(ErrorCode::kInvalid,
                "a session in host memory has no blocks: attach with a device");
  }
  if (block_device_ == nullptr) {
    TRY(auto opened, open_worker_device(device_name_, nullptr));
    block_device_ = std::move(opened.device);
  }
  return block_device_;
}

Result<WorkerBlock> Session::allocate_block(std::uint64_t bytes) {
  const std::lock_guard lock(blocks_);
  WorkerBlock made;
  TRY(made.device, block_device());
  TRY(made.block, made.device->allocate_block(bytes));
  return made;
}

Result<const ResidentCopy*> Session::resident() const {
  const std::lock_guard lock(blocks_);
  if (!resident_.block_bytes.empty()) return &resident_;
  return fail(ErrorCode::kNotFound, "this session was attached without a resident key");
}

Result<std::vector<WorkerBlock>> Session::open_resident() {
  const std::lock_guard lock(blocks_);
  const std::vector<UniqueFd> files = std::move(resident_.blocks);
  resident_.blocks.clear();
  if (files.empty() || files.size() != resident_.block_bytes.size()) {
    return fail(ErrorCode::kInvalid, "there is no resident copy here to open, or it was opened");
  }
  std::vector<WorkerBlock> opened;
  for (std::size_t i = 0; i < files.size(); ++i) {
    WorkerBlock& block = opened.emplace_back();
    TRY(block.device, block_device());
    TRY(block.block, block.device->open_block(
                         files[i], resident_.block_bytes[i],
                         resident_.shared ? bucket::Access::kRead : bucket::Access::kWrite));
  }
  return opened;
}

Result<void> Session::seal_resident(std::string key, std::string description,
                                    std::span<WorkerBlock* const> blocks,
                                    std::vector<ResidentTensor> tensors,
                                    std::chrono::milliseconds timeout) {
  if (!connection_->keeps_residents()) {
    return fail(ErrorCode::kUnavailable,
                "the agent keeps no resident copies: it is older, or has --resident-ttl 0");
  }
  const auto is_read = [](const WorkerBlock* block) {
    return block->block->access() == bucket::Access::kRead;
  };
  const bool shared = std::ranges::all_of(blocks, is_read);
  if (!shared && std::ranges::any_of(blocks, is_read)) {
    return fail(ErrorCode::kInvalid,
                "some blocks of a resident copy are for reading only: make that all of them, or "
                "none");
  }
  SealResidentRequest request{
      std::move(key), std::move(description), {}, std::move(tensors), shared};
  std::vector<UniqueFd> files;
  for (const WorkerBlock* const block : blocks) {
    request.block_bytes.push_back(block->block->bytes());
    TRY(auto file, block->block->export_descriptor());
    files.push_back(std::move(file));
  }
  return tell(request, timeout, std::move(files));
}

Result<void> Session::mend_resident(std::chrono::milliseconds timeout) {
  if (!connection_->gives_orders()) {
    return fail(ErrorCode::kUnavailable,
                "the agent of this host mends nothing: it is older than this library");
  }
  return tell(MendResidentRequest{}, timeout);
}

// --- the versions

Result<void> Session::tell(const Request& request, std::chrono::milliseconds timeout,
                           std::vector<UniqueFd> descriptors) {
  {
    const Lock lock(inbox_->mutex);
    apply_messages();
    TRY_VOID(state_.check_alive());
  }
  TRY(const Message answer,
      connection_->call(request, id_, timeout, std::make_shared<Inbox>(), std::move(descriptors)));
  if (std::holds_alternative<DoneReply>(answer.agent.reply)) return {};
  return fail(ErrorCode::kInternal, "the agent answered with something else than done");
}

Result<void> Session::begin_switch(std::chrono::milliseconds timeout) {
  return tell(BeginSwitchRequest{}, timeout);
}

Result<void> Session::report_phases(PhasesReport report) {
  return tell(std::move(report), kAgentPatience);
}

Result<void> Session::ask_commit() {
  TRY(const std::uint64_t call,
      connection_->send(LoadedRequest{state_.contents().total_bytes()}, id_, kNoDeadline, inbox_));
  state_.commit.asked(call);
  return {};
}

Result<void> Session::loaded() {
  TRY_VOID(contents());
  const Lock lock(inbox_->mutex);
  apply_messages();
  TRY_VOID(state_.check_alive());
  if (handed_out_ != count_) {
    return fail(ErrorCode::kInvalid, "{} of {} tensors have not been taken with {} yet",
                count_ - handed_out_, count_, device_ ? "rk_next_bucket" : "rk_next");
  }
  if (state_.loaded) return {};
  TRY_VOID(ask_commit());
  state_.loaded = true;
  return {};
}

Result<void> Session::wait_commit(TimePoint deadline) {
  Lock lock(inbox_->mutex);
  apply_messages();
  TRY_VOID(state_.check_alive());
  if (!state_.loaded) {
    return fail(ErrorCode::kInvalid, "this rank has not loaded yet: call rk_loaded first");
  }
  // The last attempt has failed: ask again.
  if (state_.commit.state() == CallState::kUnasked) TRY_VOID(ask_commit());
  TRY(const bool decided, wait(lock, deadline, [this] { return state_.commit.is_decided(); }));
  if (!decided) {
    return fail(ErrorCode::kTimeout, "not every rank has loaded {} yet",
                state_.version().to_string());
  }
  if (state_.commit.state() == CallState::kAnswered) return {};
  return fail(state_.commit.take_refusal());
}

Result<std::uint64_t> Session::wait_update(TimePoint deadline) {
  Lock lock(inbox_->mutex);
  apply_messages();
  TRY_VOID(state_.check_alive());
  if (state_.update.state() == CallState::kUnasked) {
    TRY(const std::uint64_t call,
        connection_->send(WatchRequest{state_.version()}, id_, kNoDeadline, inbox_));
    state_.update.asked(call);
  }
  TRY(const bool decided, wait(lock, deadline, [this] { return state_.update.is_decided(); }));
  if (!decided) {
    return fail(ErrorCode::kTimeout, "{} has no newer version yet", state_.version().to_string());
  }
  if (state_.update.state() == CallState::kAnswered) return state_.update.answer().id.version;
  return fail(state_.update.take_refusal());
}

Result<rk_order> Session::watch_order(TimePoint deadline) {
  if (!connection_->gives_orders()) {
    return fail(ErrorCode::kUnavailable,
                "the agent of this host gives no orders: it is older than this library");
  }
  Lock lock(inbox_->mutex);
  apply_messages();
  // An order that came just before the end of the session waits for its answer.
  if (!state_.order.is_decided()) TRY_VOID(state_.check_alive());
  if (state_.order.state() == CallState::kUnasked) {
    TRY(const std::uint64_t call,
        connection_->send(WatchOrdersRequest{}, id_, kNoDeadline, inbox_));
    state_.order.asked(call);
  }
  const auto waited = wait(lock, deadline, [this] { return state_.order.is_decided(); });
  if (!state_.order.is_decided()) {
    TRY_VOID(waited);
    return fail(ErrorCode::kTimeout, "there is no order for this session yet");
  }
  if (state_.order.state() == CallState::kRefused) return fail(state_.order.take_refusal());
  order_ = state_.order.take_answer();
  rk_order order{};
  order.number = order_.number;
  if (order_.serve) {
    order.kind = RK_ORDER_SERVE;
    order_version_ = order_.serve->latest
                         ? order_.serve->model
                         : ModelVersion{order_.serve->model, order_.serve->version}.to_string();
    order.model = order_version_.c_str();
  } else if (order_.damaged) {
    order.kind = RK_ORDER_MEND;
    order_tensors_.clear();
    for (const std::string& name : order_.damaged->tensors) order_tensors_.push_back(name.c_str());
    order.tensors = order_tensors_.data();
    order.tensor_count = order_tensors_.size();
  }
  return order;
}

Result<void> Session::order_done(std::uint64_t number, std::optional<Error> error,
                                 std::vector<PhaseTime> phases) {
  const OrderResultRequest result{number, std::move(error), std::move(phases)};
  TRY(const Message answer,
      connection_->call(result, id_, kAgentPatience, std::make_shared<Inbox>()));
  if (std::holds_alternative<DoneReply>(answer.agent.reply)) return {};
  return fail(ErrorCode::kInternal, "the agent answered with something else than done");
}

Result<void> Session::fill(rk_session_info& info, bool only_version) {
  if (!only_version) TRY_VOID(contents());
  const Lock lock(inbox_->mutex);
  apply_messages();
  info.model = state_.version().model.c_str();
  info.version = state_.version().version;
  if (only_version) return {};
  info.bytes_done = state_.contents().ready_bytes();
  info.bytes_total = state_.contents().total_bytes();
  info.tensors = static_cast<std::uint32_t>(count_);
  info.rung = state_.rung();
  info.device_path = device_path_;
  return {};
}

}  // namespace rekindle::client

#include "src/client/session.h"

#include <algorithm>
#include <cerrno>
#include <new>
#include <set>
#include <utility>

#include <sys/eventfd.h>

namespace rekindle::client {

namespace {

constexpr std::chrono::milliseconds kNoDeadline{0};  // the agent answers when there is something

std::vector<const std::byte*> data_of(std::span<const Mapping> segments) {
  std::vector<const std::byte*> out;
  for (const Mapping& segment : segments) out.push_back(segment.data());
  return out;
}

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

rk_tensor tensor_of(const bucket::Piece& piece) {
  return {.name = piece.name.data(),
          .dtype = piece.dtype.data(),
          .dimensions = static_cast<std::uint32_t>(piece.shape().size()),
          .shape = piece.shape().data(),
          .offset = piece.offset().data(),
          .full_shape = piece.full_shape.data(),
          .data = nullptr,
          .bytes = piece.bytes};
}

// Brings equal lists of dimensions to one address.
void share_lists(std::span<rk_tensor> tensors) {
  using List = std::span<const std::uint64_t>;
  const auto less = [](List a, List b) { return std::ranges::lexicographical_compare(a, b); };
  std::set<List, decltype(less)> seen(less);
  for (rk_tensor& tensor : tensors) {
    for (const std::uint64_t** list : {&tensor.shape, &tensor.offset, &tensor.full_shape}) {
      *list = seen.insert(List(*list, tensor.dimensions)).first->data();
    }
  }
}

}  // namespace

Result<std::shared_ptr<Session>> Session::attach(std::shared_ptr<Connection> connection,
                                                 const AttachRequest& request,
                                                 std::chrono::milliseconds timeout,
                                                 std::optional<WorkerDevice> device) {
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
  auto contents = bucket::Contents::create(attached->tensor_set, attached->layout, attached->wanted,
                                           attached->segment_bytes);
  // What a device reads is mapped where it is uploaded, if this process does that at all.
  Result<std::vector<Mapping>> segments;
  if (!device) segments = map_segments(answer.descriptors, attached->segment_bytes, false);
  if (!contents || !segments) {
    connection->forget_session(id, inbox);
    (void)connection->send(DetachRequest{}, id, kNoDeadline, nullptr);
    return fail(contents ? std::move(segments).error() : std::move(contents).error());
  }
  DeviceLoad::Source source = source_of(*attached, answer.descriptors, request.bucket_bytes);
  std::shared_ptr<Session> session(new Session(std::move(connection), inbox, id,
                                               std::move(*attached), std::move(*contents),
                                               std::move(*segments)));
  if (device) TRY_VOID(session->begin_device(std::move(*device), std::move(source)));
  const Lock lock(inbox->mutex);
  TRY_VOID(session->check_alive());
  return session;
}

Session::Session(std::shared_ptr<Connection> connection, std::shared_ptr<Inbox> inbox,
                 std::uint64_t id, AttachedReply attached, bucket::Contents contents,
                 std::vector<Mapping> segments)
    : connection_(std::move(connection)),
      inbox_(std::move(inbox)),
      id_(id),
      version_(std::move(attached.id)),
      rung_(texts_.insert(std::move(attached.rung)).first->c_str()),
      contents_(std::move(contents)),
      segments_(std::move(segments)),
      segment_data_(data_of(segments_)) {
  contents_.take_empty(complete_);
  if (auto ok = contents_.mark_ready(attached.ready, complete_); !ok) ended_ = ok.error();
  arrived_.ready = std::move(attached.ready);
}

Session::~Session() {
  connection_->forget_session(id_, inbox_);
  device_.reset();
  segments_.clear();
  (void)connection_->send(DetachRequest{}, id_, kNoDeadline, nullptr);
}

void Session::end() {
  {
    const Lock lock(inbox_->mutex);
    ended_ = Error(ErrorCode::kStale, "the session was detached");
  }
  inbox_->notify();
}

Result<void> Session::check_alive() const {
  if (ended_) return fail(*ended_);
  return {};
}

void Session::apply_messages() {
  if (inbox_->messages.empty() && (!inbox_->closed || ended_)) return;
  while (!inbox_->messages.empty()) {
    AgentMessage message = std::move(inbox_->messages.front().agent);
    inbox_->messages.pop_front();
    apply(std::move(message));
  }
  if (inbox_->closed && !ended_) ended_ = inbox_->closed;
  inbox_->notify();  // other threads may wait for what this one applied
}

void Session::apply(AgentMessage message) {
  if (message.call == 0) return apply_event(std::move(message));
  if (message.call == loaded_call_) {
    loaded_call_ = 0;
    if (message.error) {
      commit_error_ = std::move(message.error);
    } else if (std::holds_alternative<CommittedReply>(message.reply)) {
      committed_ = true;
    }
  } else if (message.call == watch_call_) {
    watch_call_ = 0;
    if (message.error) {
      watch_error_ = std::move(message.error);
    } else if (const auto* newer = std::get_if<NewVersion>(&message.reply)) {
      newer_ = newer->id.version;
    }
  }
}

void Session::apply_event(AgentMessage message) {
  if (message.error) {
    if (!ended_) ended_ = std::move(message.error);
  } else if (const auto* ready = std::get_if<TilesReady>(&message.reply)) {
    if (auto ok = contents_.mark_ready(ready->ready, complete_); !ok && !ended_) {
      ended_ = std::move(ok).error();
    }
    if (ready->complete) contents_.mark_all_ready(complete_);
    if (device_ != nullptr) {
      arrived_.ready.insert(arrived_.ready.end(), ready->ready.begin(), ready->ready.end());
      arrived_.all = arrived_.all || ready->complete;
    }
    if (!ready->rung.empty()) rung_ = texts_.insert(ready->rung).first->c_str();
  } else if (std::holds_alternative<CommittedReply>(message.reply)) {
    committed_ = true;
  } else if (const auto* newer = std::get_if<NewVersion>(&message.reply)) {
    newer_ = newer->id.version;
  }
}

Result<void> Session::wait_for_turn(Lock& lock, TimePoint deadline) {
  const InLine in_line(*this);
  if (handing_out_) inbox_->notify();  // a prefetch gives way
  TRY(const bool mine, wait(lock, deadline, [this] { return !handing_out_; }));
  if (!mine) return fail(ErrorCode::kTimeout, "another thread is waiting for tensors");
  return {};
}

Result<std::span<const rk_tensor>> Session::next(TimePoint deadline) {
  if (device_ != nullptr) {
    return fail(ErrorCode::kInvalid,
                "this session's tensors come on {}: call rk_next_bucket or rk_load_into",
                device_->id());
  }
  Lock lock(inbox_->mutex);
  TRY_VOID(wait_for_turn(lock, deadline));
  const Turn turn(*this);
  const std::size_t total = contents_.pieces().size();
  TRY(const bool some,
      wait(lock, deadline, [&] { return !complete_.empty() || handed_out_ == total; }));
  if (!some) {
    return fail(ErrorCode::kTimeout, "no further tensor of {} yet: {} of {} are here",
                version_.to_string(), handed_out_, total);
  }
  if (complete_.empty()) return std::span<const rk_tensor>();
  return hand_out(lock);
}

// Only one thread is here. What could not be handed out stays in complete_.
Result<std::span<const rk_tensor>> Session::hand_out(Lock& lock) {
  const std::vector<std::size_t> now = complete_;
  std::vector<rk_tensor> tensors(now.size());
  lock.unlock();  // copies may take a while
  const std::size_t gathered = gathered_.size();
  const auto made = materialize(now, tensors);
  if (!made) gathered_.resize(gathered);
  lock.lock();
  TRY_VOID(made);
  TRY_VOID(check_alive());
  batches_.push_back(std::move(tensors));
  complete_.erase(complete_.begin(), complete_.begin() + static_cast<std::ptrdiff_t>(now.size()));
  handed_out_ += now.size();
  return std::span<const rk_tensor>(batches_.back());
}

Result<void> Session::materialize(std::span<const std::size_t> pieces,
                                  std::span<rk_tensor> out) try {
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    TRY(out[i], materialize(contents_.pieces()[pieces[i]]));
  }
  share_lists(out);
  return {};
} catch (const std::bad_alloc&) {
  return fail(ErrorCode::kExhausted, "out of memory");
}

Result<rk_tensor> Session::materialize(const bucket::Piece& piece) {
  const void* data = nullptr;
  if (piece.in_place) {
    data = segment_data_[piece.segment] + piece.offset_bytes;
  } else if (piece.bytes > 0) {
    TRY(Mapping copy, Mapping::anonymous(piece.bytes));
    contents_.gather(piece, segment_data_, copy.data());
    data = copy.data();
    gathered_.push_back(std::move(copy));
  }
  rk_tensor tensor = tensor_of(piece);
  tensor.data = data;
  return tensor;
}

std::span<const rk_tensor> Session::tensors() {
  const Lock lock(inbox_->mutex);
  if (tensors_.empty()) {
    tensors_.reserve(contents_.pieces().size());
    for (const bucket::Piece& piece : contents_.pieces()) tensors_.push_back(tensor_of(piece));
    share_lists(tensors_);
  }
  return tensors_;
}

std::span<const rk_tensor> Session::catalog() {
  static const Dims kFirst = Dims::zeros(kMaxRank);
  const Lock lock(inbox_->mutex);
  if (!catalog_.empty()) return catalog_;
  const auto tensors = contents_.tensors().tensors();
  catalog_.reserve(tensors.size());
  for (const TensorInfo& tensor : tensors) {
    const std::uint64_t* const shape = tensor.shape.span().data();
    catalog_.push_back({.name = tensor.name.c_str(),
                        .dtype = dtype_name(tensor.dtype).data(),
                        .dimensions = static_cast<std::uint32_t>(tensor.shape.rank()),
                        .shape = shape,
                        .offset = kFirst.span().data(),
                        .full_shape = shape,
                        .data = nullptr,
                        .bytes = tensor.shape.product() * dtype_size_bytes(tensor.dtype)});
  }
  share_lists(catalog_);
  return catalog_;
}

Result<void> Session::loaded() {
  const Lock lock(inbox_->mutex);
  apply_messages();
  TRY_VOID(check_alive());
  const std::size_t total = contents_.pieces().size();
  if (handed_out_ != total) {
    return fail(ErrorCode::kInvalid, "{} of {} tensors have not been taken with {} yet",
                total - handed_out_, total, device_ ? "rk_next_bucket" : "rk_next");
  }
  if (loaded_) return {};
  TRY(loaded_call_,
      connection_->send(LoadedRequest{contents_.total_bytes()}, id_, kNoDeadline, inbox_));
  loaded_ = true;
  return {};
}

Result<void> Session::wait_commit(TimePoint deadline) {
  Lock lock(inbox_->mutex);
  apply_messages();
  TRY_VOID(check_alive());
  if (!loaded_) {
    return fail(ErrorCode::kInvalid, "this rank has not loaded yet: call rk_loaded first");
  }
  if (!committed_ && loaded_call_ == 0 && !commit_error_) {  // the last one failed: ask again
    TRY(loaded_call_,
        connection_->send(LoadedRequest{contents_.total_bytes()}, id_, kNoDeadline, inbox_));
  }
  TRY(const bool decided, wait(lock, deadline, [this] { return committed_ || commit_error_; }));
  if (committed_) return {};
  if (!decided) {
    return fail(ErrorCode::kTimeout, "not every rank has loaded {} yet", version_.to_string());
  }
  return fail(*std::exchange(commit_error_, std::nullopt));
}

Result<std::uint64_t> Session::wait_update(TimePoint deadline) {
  Lock lock(inbox_->mutex);
  apply_messages();
  TRY_VOID(check_alive());
  if (!newer_ && watch_call_ == 0 && !watch_error_) {
    TRY(watch_call_, connection_->send(WatchRequest{version_}, id_, kNoDeadline, inbox_));
  }
  TRY(const bool decided, wait(lock, deadline, [this] { return newer_ || watch_error_; }));
  if (newer_) return *newer_;
  if (!decided) {
    return fail(ErrorCode::kTimeout, "{} has no newer version yet", version_.to_string());
  }
  return fail(*std::exchange(watch_error_, std::nullopt));
}

void Session::fill(rk_session_info& info) {
  const Lock lock(inbox_->mutex);
  apply_messages();
  info.model = version_.model.c_str();
  info.version = version_.version;
  info.bytes_done = contents_.ready_bytes();
  info.bytes_total = contents_.total_bytes();
  info.tensors = static_cast<std::uint32_t>(contents_.pieces().size());
  info.rung = rung_;
  info.device_path = device_path_;
}

}  // namespace rekindle::client

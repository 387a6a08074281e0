#include "recovery/keeper/keeper_link.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>
#include <spawn.h>

#include "recovery/keeper/keeper.h"
#include "recovery/rpc/convert.h"
#include "src/base/log.h"
#include "src/base/version.h"
#include "src/ipc/unix_socket.h"

namespace rekindle::keeper {

namespace asio = boost::asio;

namespace {

// Between two tries to reach a keeper that starts.
constexpr std::chrono::milliseconds kTryAgain{10};
// A keeper that does not accept within this time hangs. It is short, because it stops this thread.
constexpr std::chrono::milliseconds kAccept{100};
constexpr const char* kLogFile = "keeper.log";

Error stopped() { return Error(ErrorCode::kUnavailable, "the agent of this host stops"); }

// Calls it when it goes, also when a cancelled coroutine goes.
template <typename Call>
class AtEnd {
 public:
  explicit AtEnd(Call call) : call_(std::move(call)) {}
  ~AtEnd() { call_(); }
  AtEnd(const AtEnd&) = delete;
  AtEnd& operator=(const AtEnd&) = delete;

 private:
  const Call call_;
};

Error lost(const Error& why) {
  return Error(ErrorCode::kPeerLost,
               fmt::format("the keeper of this host is gone: {}", why.message()));
}

}  // namespace

class KeeperLink::UnderWay {
 public:
  explicit UnderWay(KeeperLink& link) : link_(link) { ++link_.under_way_; }
  ~UnderWay() {
    if (--link_.under_way_ == 0) link_.idle_.notify();
  }
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;

 private:
  KeeperLink& link_;
};

KeeperLink::KeeperLink(asio::any_io_executor executor, KeeperLinkOptions options)
    : executor_(executor),
      options_(std::move(options)),
      opened_(executor),
      idle_(executor),
      tasks_(executor) {}

KeeperLink::~KeeperLink() { reap(); }

async::Task<void> KeeperLink::close(std::chrono::milliseconds deadline) {
  closing_ = true;
  const TimePoint until = steady_now() + deadline;
  if (socket_ != nullptr) socket_->close(stopped());
  opened_.notify();
  for (const auto& [number, call] : calls_) call->done.notify();
  while (under_way_ > 0 && steady_now() < until) co_await idle_.wait_until(until);
  (void)co_await tasks_.close(deadline);
}

// --- calls

async::Task<Result<UserId>> KeeperLink::keep(Order order) {
  proto::AgentToKeeper frame;
  auto& keep = *frame.mutable_keep();
  keep.set_name(std::move(order.name));
  keep.set_record(std::move(order.record));
  keep.set_time_to_live_ms(
      static_cast<std::uint64_t>(std::max<std::int64_t>(order.time_to_live.count(), 0)));
  keep.set_owner(order.owner);
  std::vector<UniqueFd> descriptors = std::move(order.blocks);
  descriptors.push_back(std::move(order.user));
  return ask<UserId>(std::move(frame), std::move(descriptors), take_user);
}

async::Task<Result<UserId>> KeeperLink::use(std::string name, UniqueFd user) {
  proto::AgentToKeeper frame;
  frame.mutable_use()->set_name(std::move(name));
  std::vector<UniqueFd> descriptors;
  descriptors.push_back(std::move(user));
  return ask<UserId>(std::move(frame), std::move(descriptors), take_user);
}

async::Task<Result<void>> KeeperLink::leave(std::string name, UserId user) {
  proto::AgentToKeeper frame;
  frame.mutable_leave()->set_name(std::move(name));
  frame.mutable_leave()->set_user(user);
  return ask<void>(std::move(frame), {}, take_nothing);
}

async::Task<Result<KeeperLink::Kept>> KeeperLink::get(std::string name) {
  proto::AgentToKeeper frame;
  frame.mutable_get()->set_name(std::move(name));
  return ask<Kept>(std::move(frame), {}, [](Answer answer) -> Result<Kept> {
    const proto::KeptCopy& copy = answer.frame.copy();
    Kept kept{copy.record(), std::move(answer.descriptors), {}};
    const auto users = static_cast<std::size_t>(copy.users_size());
    if (kept.blocks.size() < users) {
      return fail(ErrorCode::kCorrupt, "the keeper sent {} descriptors of a copy with {} users",
                  kept.blocks.size(), users);
    }
    const std::size_t blocks = kept.blocks.size() - users;
    for (std::size_t i = 0; i < users; ++i) {
      kept.users[copy.users(static_cast<int>(i))] = std::move(kept.blocks[blocks + i]);
    }
    kept.blocks.resize(blocks);
    return kept;
  });
}

async::Task<Result<void>> KeeperLink::drop(std::string name) {
  proto::AgentToKeeper frame;
  frame.mutable_drop()->set_name(std::move(name));
  return ask<void>(std::move(frame), {}, take_nothing);
}

async::Task<Result<KeeperLink::UsersByCopy>> KeeperLink::list() {
  proto::AgentToKeeper frame;
  frame.mutable_list();
  return ask<UsersByCopy>(std::move(frame), {}, [](Answer answer) -> Result<UsersByCopy> {
    UsersByCopy copies;
    for (const auto& copy : answer.frame.list().copies()) {
      copies[copy.name()] = {copy.users().begin(), copy.users().end()};
    }
    return copies;
  });
}

Result<UserId> KeeperLink::take_user(Answer answer) { return answer.frame.user().user(); }

Result<void> KeeperLink::take_nothing(Answer) { return {}; }

template <typename T>
async::Task<Result<T>> KeeperLink::ask(proto::AgentToKeeper frame,
                                       std::vector<UniqueFd> descriptors,
                                       Result<T> (*take)(Answer)) {
  const UnderWay under_way(*this);
  const TimePoint deadline = steady_now() + options_.deadline;
  auto opening = open(deadline);
  if (auto opened = co_await std::move(opening); !opened) {
    co_return fail(std::move(opened).error());
  }
  auto exchanged = exchange(std::move(frame), std::move(descriptors), deadline);
  auto answer = co_await std::move(exchanged);
  if (!answer) co_return fail(std::move(answer).error());
  co_return take(std::move(*answer));
}

async::Task<Result<KeeperLink::Answer>> KeeperLink::exchange(proto::AgentToKeeper frame,
                                                             std::vector<UniqueFd> descriptors,
                                                             TimePoint deadline) {
  if (closing_) co_return fail(stopped());
  if (socket_ == nullptr) {
    co_return fail(ErrorCode::kPeerLost, "the keeper of this host ended as soon as it was there");
  }
  const std::uint64_t number = ++last_call_;
  frame.set_call(number);
  const auto call = std::make_shared<Call>(executor_);
  if (auto sent = socket_->send(frame.SerializeAsString(), std::move(descriptors)); !sent) {
    co_return fail(std::move(sent).error());
  }
  calls_[number] = call;
  const AtEnd forget([this, number] { calls_.erase(number); });
  while (!call->answer && !closing_ && steady_now() < deadline) {
    co_await call->done.wait_until(deadline);
  }
  if (!call->answer && closing_) co_return fail(stopped());
  if (!call->answer) {
    const Error why(
        ErrorCode::kTimeout,
        fmt::format("the keeper of this host has not answered for {} ms: is it stopped?",
                    options_.deadline.count()));
    // A late answer would carry descriptors that nobody takes.
    if (socket_ != nullptr) socket_->close(why);
    co_return fail(why);
  }
  co_return std::move(*call->answer);
}

// --- the connection

async::Task<Result<void>> KeeperLink::open(TimePoint deadline) {
  while (opening_ && !closing_ && steady_now() < deadline) co_await opened_.wait_until(deadline);
  if (closing_) co_return fail(stopped());
  if (opening_) co_return fail(ErrorCode::kTimeout, "the keeper of this host does not start");
  if (socket_ != nullptr) co_return Result<void>();
  opening_ = true;
  const AtEnd opened([this] {
    opening_ = false;
    opened_.notify();
  });
  for (;;) {
    auto connecting = connect(deadline);
    auto connected = co_await std::move(connecting);
    // A keeper that dies still accepts for a moment.
    const bool died = !connected && connected.error().code() == ErrorCode::kPeerLost;
    if (!died || closing_ || steady_now() >= deadline) co_return connected;
    co_await async::sleep_for(kTryAgain);
  }
}

async::Task<Result<void>> KeeperLink::connect(TimePoint deadline) {
  auto fd = reach();
  while (!fd && !closing_ && steady_now() < deadline) {
    const bool absent =
        fd.error().code() == ErrorCode::kUnavailable || fd.error().code() == ErrorCode::kNotFound;
    if (!absent || options_.program.empty()) break;
    // One that ended at once may have met another keeper that was just ending.
    reap();
    if (child_ < 0) {
      if (auto ran = start_keeper(); !ran) co_return ran;
    }
    co_await async::sleep_for(kTryAgain);
    fd = reach();
  }
  if (!fd) co_return fail(std::move(fd).error().with_context("reach the keeper of this host"));
  if (closing_) co_return fail(stopped());
  auto channel = ipc::Channel::adopt(std::move(*fd), ipc::kMaxFrameDescriptors);
  if (!channel) co_return fail(std::move(channel).error());
  socket_ = std::make_shared<ipc::FramedSocket>(executor_, std::move(*channel),
                                                ipc::FramedSocketOptions{});
  tasks_.spawn("keeper.read", read(socket_));
  proto::AgentToKeeper frame;
  auto& hello = *frame.mutable_hello();
  hello.set_protocol_min(kKeeperProtocol);
  hello.set_protocol_max(kKeeperProtocol);
  hello.set_software(std::string(software_version()));
  auto greeting = exchange(std::move(frame), {}, deadline);
  auto greeted = co_await std::move(greeting);
  if (greeted) co_return Result<void>();
  if (socket_ != nullptr) socket_->close(greeted.error());
  co_return fail(std::move(greeted).error());
}

Result<UniqueFd> KeeperLink::reach() const {
  const std::string path = options_.directory / kKeeperSocket;
  TRY_VOID(ipc::check_unix_path(path));
  TRY(auto fd, ipc::connect_unix_socket(path, steady_now() + kAccept));
  TRY(const auto peer, ipc::peer_of(fd.get()));
  TRY_VOID(ipc::check_peer(peer, {}, path));
  return fd;
}

// In a new session, because the keeper outlives this process.
Result<void> KeeperLink::start_keeper() {
  reap();
  const std::string log = options_.directory / kLogFile;
  const std::string directory = options_.directory.string();
  const std::string idle = std::to_string(options_.idle.count());
  std::vector<std::string> words{options_.program, "keeper", "--directory",
                                 directory,        "--idle", idle};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  (void)::posix_spawn_file_actions_init(&actions);
  (void)::posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  (void)::posix_spawnattr_setsigmask(&attributes, &none);
  (void)::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSID);
  int error = ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDWR, 0);
  // A pipe of this process would otherwise stay open as long as the keeper runs.
  if (error == 0) {
    error = ::posix_spawn_file_actions_addopen(&actions, 1, log.c_str(),
                                               O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW, 0600);
  }
  if (error == 0) error = ::posix_spawn_file_actions_adddup2(&actions, 1, 2);
  if (error == 0) {
    error = ::posix_spawn(&child_, options_.program.c_str(), &actions, &attributes,
                          arguments.data(), environ);
  }
  (void)::posix_spawn_file_actions_destroy(&actions);
  (void)::posix_spawnattr_destroy(&attributes);
  if (error == 0) {
    log::info("keeper.started", "pid", child_);
    return {};
  }
  child_ = -1;
  return fail_errno(error, "start the keeper");
}

void KeeperLink::reap() {
  if (child_ > 0 && ::waitpid(child_, nullptr, WNOHANG) != 0) child_ = -1;
}

async::Task<void> KeeperLink::read(std::shared_ptr<ipc::FramedSocket> socket) {
  co_await asio::this_coro::throw_if_cancelled(false);
  ipc::FramedSocket::OnFrame on_frame = [this](ipc::Frame frame) {
    return this->on_frame(std::move(frame));
  };
  const Error why = co_await socket->run(std::move(on_frame));
  socket_.reset();
  reap();
  for (const auto& [number, call] : calls_) {
    if (!call->answer) call->answer = fail(lost(why));
    call->done.notify();
  }
  if (!closing_) later([why](KeeperEvents& events) { events.keeper_lost(why); });
}

// Posted, so that the answers before the event have reached their callers.
void KeeperLink::later(std::function<void(KeeperEvents&)> event) {
  asio::post(executor_, [this, lifetime = std::weak_ptr(lifetime_), event = std::move(event)] {
    if (!lifetime.expired() && events_ != nullptr) event(*events_);
  });
}

Result<void> KeeperLink::on_frame(ipc::Frame frame) {
  Answer answer;
  if (!answer.frame.ParseFromString(frame.body)) {
    return fail(ErrorCode::kInvalid, "a malformed frame of {} bytes", frame.body.size());
  }
  answer.descriptors = std::move(frame.descriptors);
  if (answer.frame.call() == 0) {
    if (answer.frame.has_user_gone()) {
      later([gone = answer.frame.user_gone()](KeeperEvents& events) {
        events.user_gone(gone.name(), gone.user());
      });
    } else if (answer.frame.has_expired()) {
      later([name = answer.frame.expired().name()](KeeperEvents& events) {
        events.copy_expired(name);
      });
    }
    return {};
  }
  const auto found = calls_.find(answer.frame.call());
  if (found == calls_.end()) return {};
  Call& call = *found->second;
  if (answer.frame.has_error()) {
    auto failed = rpc::from_status(answer.frame.error());
    call.answer = failed ? Result<Answer>(std::move(answer)) : fail(std::move(failed).error());
  } else {
    call.answer = std::move(answer);
  }
  call.done.notify();
  return {};
}

}  // namespace rekindle::keeper

#include "recovery/keeper/keeper.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <boost/asio/error.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>

#include "proto/keeper.pb.h"
#include "recovery/keeper/kept_copies.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/rpc_listener.h"
#include "src/async/task_group.h"
#include "src/base/duplicate_fd.h"
#include "src/base/log.h"
#include "src/base/protocol_range.h"
#include "src/base/version.h"
#include "src/ipc/framed_socket.h"
#include "src/ipc/process_age.h"
#include "src/ipc/unix_socket.h"

namespace rekindle::keeper {

namespace asio = boost::asio;

namespace {

constexpr const char* kLockFile = "keeper.lock";
constexpr std::size_t kMostConnections = 16;
constexpr std::chrono::milliseconds kMostTimeToLive = std::chrono::hours(24 * 7);

// A connection of an agent, or of what claims to be one.
struct Connection {
  std::shared_ptr<ipc::FramedSocket> socket;
  bool greeted = false;
};
using ConnectionPtr = std::shared_ptr<Connection>;

// An answer, or why there is none.
struct Answer {
  proto::KeeperToAgent frame;
  std::vector<UniqueFd> descriptors = {};
};

class Keeper {
 public:
  explicit Keeper(const KeeperOptions& options)
      : options_(options), tasks_(context_.get_executor()), timer_(context_) {}

  Result<void> run();

 private:
  using Watch = asio::posix::stream_descriptor;

  Result<void> take_lock();
  void accept(rpc::Socket socket);
  async::Task<void> serve(ConnectionPtr connection);
  Result<void> on_frame(Connection& connection, ipc::Frame frame);
  Result<Answer> obey(Connection& connection, const proto::AgentToKeeper& frame,
                      std::vector<UniqueFd> descriptors);
  Result<Answer> greet(Connection& connection, const proto::KeeperHello& hello);
  Result<Answer> keep(const proto::KeepCopy& order, std::vector<UniqueFd> descriptors);
  Result<Answer> use(const std::string& name, UniqueFd pidfd);
  Result<Answer> get(const std::string& name) const;
  Answer list() const;
  void leave(const std::string& name, UserId user);
  void user_gone(UserId user);
  void forget_users(const std::string& name);
  void tell_all(const proto::KeeperToAgent& event);
  void look();

  const KeeperOptions options_;
  asio::io_context context_{1};
  async::TaskGroup tasks_;
  KeptCopies copies_{std::random_device()() * (UserId{1} << 32)};
  std::map<UserId, std::shared_ptr<Watch>> watches_;
  std::set<ConnectionPtr> connections_;
  UniqueFd lock_;
  std::shared_ptr<rpc::Listener> listener_;
  // For the next copy that expires, or the end of an idle keeper.
  asio::steady_timer timer_;
  TimePoint busy_at_ = steady_now();
};

Result<void> Keeper::take_lock() {
  const std::string path = options_.directory / kLockFile;
  lock_ = UniqueFd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock_) return fail_errno(errno, "open " + path);
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) == 0) return {};
  if (errno != EWOULDBLOCK) return fail_errno(errno, "lock " + path);
  return fail(ErrorCode::kUnavailable, "another keeper serves {}", options_.directory.string());
}

Result<void> Keeper::run() {
  const std::string directory = options_.directory.string();
  if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    return fail_errno(errno, "make " + directory);
  }
  TRY_VOID(take_lock());
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    (void)::setrlimit(RLIMIT_NOFILE, &files);
  }
  const std::string path = options_.directory / kKeeperSocket;
  TRY(auto fd, ipc::listen_unix_socket(path));
  listener_ = std::make_shared<rpc::Listener>(
      context_.get_executor(), std::move(fd), path,
      [this](rpc::Socket socket, const std::string&) { accept(std::move(socket)); }, [] {});
  listener_->start();
  asio::signal_set signals(context_, SIGTERM, SIGINT);
  signals.async_wait([this](const boost::system::error_code& error, int) {
    if (!error) context_.stop();
  });
  log::info("keeper.ready", "socket", path);
  look();
  context_.run();
  listener_->close();
  log::info("keeper.ended", "copies", copies_.all().size());
  return {};
}

// Drops what has expired, ends an idle keeper, and sets the time of the next look.
void Keeper::look() {
  const TimePoint now = steady_now();
  for (const std::string& name : copies_.expire(now)) {
    log::info("keeper.expired", "copy", name);
    proto::KeeperToAgent event;
    event.mutable_expired()->set_name(name);
    tell_all(event);
  }
  std::optional<TimePoint> next = copies_.next_expiry();
  if (!copies_.all().empty() || !connections_.empty()) busy_at_ = now;
  if (options_.idle && copies_.all().empty() && connections_.empty()) {
    next = busy_at_ + *options_.idle;
    if (*next <= now) return context_.stop();
  }
  timer_.cancel();
  if (!next) return;
  timer_.expires_at(*next);
  timer_.async_wait([this](const boost::system::error_code& error) {
    if (!error) look();
  });
}

// --- connections

void Keeper::accept(rpc::Socket socket) {
  UniqueFd fd(socket.release());
  auto peer = ipc::peer_of(fd.get());
  if (peer) {
    const auto allowed = ipc::check_peer(*peer, {}, listener_->unix_path());
    if (!allowed) {
      log::warn("keeper.refused", "error", allowed.error());
      return;
    }
  }
  auto channel = ipc::Channel::adopt(std::move(fd), ipc::kMaxFrameDescriptors);
  if (!peer || !channel || connections_.size() >= kMostConnections) {
    log::warn("keeper.refused", "connections", connections_.size());
    return;
  }
  auto connection = std::make_shared<Connection>();
  connection->socket = std::make_shared<ipc::FramedSocket>(
      context_.get_executor(), std::move(*channel), ipc::FramedSocketOptions{});
  connections_.insert(connection);
  tasks_.spawn("keeper.agent", serve(std::move(connection)));
  look();
}

async::Task<void> Keeper::serve(ConnectionPtr connection) {
  co_await asio::this_coro::throw_if_cancelled(false);
  const Error why = co_await connection->socket->run(
      [this, raw = connection.get()](ipc::Frame frame) -> Result<void> {
        return on_frame(*raw, std::move(frame));
      });
  log::debug("keeper.left", "why", why);
  connections_.erase(connection);
  busy_at_ = steady_now();
  look();
}

void Keeper::tell_all(const proto::KeeperToAgent& event) {
  for (const ConnectionPtr& connection : connections_) {
    if (connection->greeted) (void)connection->socket->send(event.SerializeAsString());
  }
}

// An error closes the connection. A call that fails is answered.
Result<void> Keeper::on_frame(Connection& connection, ipc::Frame frame) {
  proto::AgentToKeeper asked;
  if (!asked.ParseFromString(frame.body)) {
    return fail(ErrorCode::kInvalid, "a malformed frame of {} bytes", frame.body.size());
  }
  Answer answer;
  auto obeyed = obey(connection, asked, std::move(frame.descriptors));
  if (obeyed) {
    answer = std::move(*obeyed);
  } else {
    *answer.frame.mutable_error() = rpc::to_status(obeyed.error());
  }
  answer.frame.set_call(asked.call());
  TRY_VOID(
      connection.socket->send(answer.frame.SerializeAsString(), std::move(answer.descriptors)));
  look();
  return {};
}

Result<Answer> Keeper::obey(Connection& connection, const proto::AgentToKeeper& frame,
                            std::vector<UniqueFd> descriptors) {
  if (!connection.greeted && frame.kind_case() != proto::AgentToKeeper::kHello) {
    return fail(ErrorCode::kInvalid, "the first message to a keeper is a hello");
  }
  Answer done;
  done.frame.mutable_done();
  switch (frame.kind_case()) {
    case proto::AgentToKeeper::kHello:
      return greet(connection, frame.hello());
    case proto::AgentToKeeper::kKeep:
      return keep(frame.keep(), std::move(descriptors));
    case proto::AgentToKeeper::kUse:
      if (descriptors.size() != 1) {
        return fail(ErrorCode::kInvalid, "use a copy: {} descriptors came in place of one",
                    descriptors.size());
      }
      return use(frame.use().name(), std::move(descriptors.front()));
    case proto::AgentToKeeper::kLeave:
      leave(frame.leave().name(), frame.leave().user());
      return done;
    case proto::AgentToKeeper::kGet:
      return get(frame.get().name());
    case proto::AgentToKeeper::kDrop:
      forget_users(frame.drop().name());
      TRY_VOID(copies_.drop(frame.drop().name()));
      return done;
    case proto::AgentToKeeper::kList:
      return list();
    default:
      return fail(ErrorCode::kInvalid, "this keeper ({}) does not know the call",
                  software_version());
  }
}

Result<Answer> Keeper::greet(Connection& connection, const proto::KeeperHello& hello) {
  const std::string software(software_version());
  if (const auto conflict = protocol_conflict(
          {fmt::format("the agent ({})", hello.software()), hello.protocol_min(),
           hello.protocol_max()},
          {fmt::format("the keeper ({})", software), kKeeperProtocol, kKeeperProtocol})) {
    return fail(ErrorCode::kUnavailable, "{}", *conflict);
  }
  connection.greeted = true;
  Answer answer;
  auto& own = *answer.frame.mutable_hello();
  own.set_protocol_min(kKeeperProtocol);
  own.set_protocol_max(kKeeperProtocol);
  own.set_software(software);
  return answer;
}

// --- calls

Result<Answer> Keeper::keep(const proto::KeepCopy& order, std::vector<UniqueFd> descriptors) {
  if (descriptors.empty()) return fail(ErrorCode::kInvalid, "keep a copy: its user did not come");
  UniqueFd pidfd = std::move(descriptors.back());
  descriptors.pop_back();
  const auto most = static_cast<std::uint64_t>(kMostTimeToLive.count());
  KeptCopy copy{order.record(), std::move(descriptors),
                std::chrono::milliseconds(std::min(order.time_to_live_ms(), most)), order.owner()};
  TRY_VOID(copies_.keep(order.name(), std::move(copy), steady_now()));
  auto used = use(order.name(), std::move(pidfd));
  if (!used) (void)copies_.drop(order.name());
  return used;
}

Result<Answer> Keeper::use(const std::string& name, UniqueFd pidfd) {
  // Other descriptors never tell that a process has died.
  if (!ipc::pid_of(pidfd.get())) {
    return fail(ErrorCode::kInvalid, "use a copy '{}': the descriptor is not of a process", name);
  }
  TRY(const UserId user, copies_.add_user(name));
  boost::system::error_code refused;
  const auto watch = std::make_shared<Watch>(context_);
  watch->assign(pidfd.get(), refused);
  if (refused) {
    (void)copies_.remove_user(user, steady_now());
    return fail(ErrorCode::kInvalid, "watch a process that uses '{}': {}", name, refused.message());
  }
  (void)pidfd.release();
  watches_[user] = watch;
  // The handler keeps the descriptor until it has run.
  watch->async_wait(Watch::wait_read, [this, user, watch](const boost::system::error_code& error) {
    // Without a watch it would never be known to have died.
    if (error != asio::error::operation_aborted) user_gone(user);
  });
  Answer answer;
  answer.frame.mutable_user()->set_name(name);
  answer.frame.mutable_user()->set_user(user);
  return answer;
}

Result<Answer> Keeper::get(const std::string& name) const {
  const KeptCopy* const copy = copies_.find(name);
  if (copy == nullptr) return fail(ErrorCode::kNotFound, "the keeper has no copy '{}'", name);
  Answer answer;
  TRY(answer.descriptors, duplicate_all(copy->blocks, "hand out a block"));
  auto& kept = *answer.frame.mutable_copy();
  kept.set_name(name);
  kept.set_record(copy->record);
  for (const UserId user : copy->users) {
    kept.add_users(user);
    TRY(auto pidfd, duplicate(watches_.at(user)->native_handle(), "hand out a pidfd"));
    answer.descriptors.push_back(std::move(pidfd));
  }
  return answer;
}

Answer Keeper::list() const {
  Answer answer;
  auto& list = *answer.frame.mutable_list();
  for (const auto& [name, copy] : copies_.all()) {
    auto& one = *list.add_copies();
    one.set_name(name);
    for (const UserId user : copy.users) one.add_users(user);
  }
  return answer;
}

// --- users

void Keeper::leave(const std::string& name, UserId user) {
  const KeptCopy* const copy = copies_.find(name);
  if (copy == nullptr || !copy->users.contains(user)) return;
  if (!copies_.remove_user(user, steady_now())) return;
  const auto watch = watches_.extract(user);
  watch.mapped()->close();
}

void Keeper::user_gone(UserId user) {
  watches_.erase(user);
  const auto name = copies_.remove_user(user, steady_now());
  // It left at the same time.
  if (!name) return;
  log::info("keeper.user_gone", "copy", *name, "users", copies_.find(*name)->users.size());
  proto::KeeperToAgent event;
  event.mutable_user_gone()->set_name(*name);
  event.mutable_user_gone()->set_user(user);
  tell_all(event);
  look();
}

void Keeper::forget_users(const std::string& name) {
  const KeptCopy* const copy = copies_.find(name);
  if (copy == nullptr) return;
  for (const UserId user : copy->users) {
    const auto watch = watches_.extract(user);
    watch.mapped()->close();
  }
}

}  // namespace

Result<void> run_keeper(const KeeperOptions& options) { return Keeper(options).run(); }

}  // namespace rekindle::keeper

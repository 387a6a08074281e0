#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <sys/types.h>

#include <boost/asio/any_io_executor.hpp>

#include "proto/keeper.pb.h"
#include "recovery/keeper/kept_copies.h"
#include "src/async/task.h"
#include "src/async/task_group.h"
#include "src/ipc/framed_socket.h"

namespace rekindle::keeper {

struct KeeperLinkOptions {
  // DIR/agent.
  std::filesystem::path directory;
  // Starts a keeper: `program` keeper --directory DIR/agent --idle SECONDS. Empty: another has to.
  std::string program = "/proc/self/exe";
  // A keeper that this link has started ends after this time without copies and agents.
  std::chrono::seconds idle{60};
  // Of each call, the start of a keeper included.
  std::chrono::milliseconds deadline{5000};
};

// What becomes of copies without a call of this agent. An event comes after the answers to the
// calls before it.
class KeeperEvents {
 public:
  virtual ~KeeperEvents() = default;
  // The process has died.
  virtual void user_gone(const std::string& copy, UserId user) = 0;
  // The copy had no user for its time.
  virtual void copy_expired(const std::string& copy) = 0;
  // The keeper has ended, or did not answer. list() says what it still has.
  virtual void keeper_lost(const Error& why) = 0;
};

// The agent's side of the keeper. The first call connects, and starts a keeper if none runs. Every
// call ends within its deadline; kPeerLost or kTimeout: the keeper has ended or does not answer.
// Control thread only.
class KeeperLink {
 public:
  KeeperLink(boost::asio::any_io_executor executor, KeeperLinkOptions options);
  ~KeeperLink();
  // Null: nobody receives the events.
  void tell_events(KeeperEvents* events) { events_ = events; }
  // Leaves the keeper, which goes on. Ends the calls. Await it before this object goes.
  async::Task<void> close(std::chrono::milliseconds deadline);

  struct Order {
    std::string name;
    std::string record;
    std::vector<UniqueFd> blocks;
    // A pidfd of the process that has the blocks open.
    UniqueFd user;
    std::chrono::milliseconds time_to_live{};
    // The uid of the process.
    std::uint32_t owner = 0;
  };
  // kInvalid: there is a copy of this name. kExhausted: the keeper is full.
  async::Task<Result<UserId>> keep(Order order);
  // One more process has the blocks open. kNotFound; kExhausted.
  async::Task<Result<UserId>> use(std::string name, UniqueFd user);
  // The process lives and has closed the blocks.
  async::Task<Result<void>> leave(std::string name, UserId user);
  struct Kept {
    std::string record;
    std::vector<UniqueFd> blocks;
    // With the pidfd of each.
    std::map<UserId, UniqueFd> users;
  };
  // kNotFound.
  async::Task<Result<Kept>> get(std::string name);
  // kNotFound. Processes that have the blocks open keep them.
  async::Task<Result<void>> drop(std::string name);
  using UsersByCopy = std::map<std::string, std::vector<UserId>>;
  // The copies and their users.
  async::Task<Result<UsersByCopy>> list();

 private:
  struct Answer {
    proto::KeeperToAgent frame;
    std::vector<UniqueFd> descriptors;
  };
  struct Call {
    explicit Call(const boost::asio::any_io_executor& executor) : done(executor) {}
    async::Notifier done;
    std::optional<Result<Answer>> answer;
  };

  // While it lives, a call is under way.
  class UnderWay;
  // `take` makes the result out of the answer.
  template <typename T>
  async::Task<Result<T>> ask(proto::AgentToKeeper frame, std::vector<UniqueFd> descriptors,
                             Result<T> (*take)(Answer));
  static Result<UserId> take_user(Answer answer);
  static Result<void> take_nothing(Answer answer);
  async::Task<Result<Answer>> exchange(proto::AgentToKeeper frame,
                                       std::vector<UniqueFd> descriptors, TimePoint deadline);
  async::Task<Result<void>> open(TimePoint deadline);
  async::Task<Result<void>> connect(TimePoint deadline);
  Result<UniqueFd> reach() const;
  Result<void> start_keeper();
  void reap();
  void later(std::function<void(KeeperEvents&)> event);
  async::Task<void> read(std::shared_ptr<ipc::FramedSocket> socket);
  Result<void> on_frame(ipc::Frame frame);

  const boost::asio::any_io_executor executor_;
  const KeeperLinkOptions options_;
  KeeperEvents* events_ = nullptr;
  // Null: not connected.
  std::shared_ptr<ipc::FramedSocket> socket_;
  std::map<std::uint64_t, std::shared_ptr<Call>> calls_;
  std::uint64_t last_call_ = 0;
  // A call connects; others wait for it.
  bool opening_ = false;
  async::Notifier opened_;
  bool closing_ = false;
  std::size_t under_way_ = 0;
  // No call is under way.
  async::Notifier idle_;
  // While it lives, posted events find this object.
  struct Lifetime {};
  const std::shared_ptr<Lifetime> lifetime_ = std::make_shared<Lifetime>();
  // The keeper that this link has started last; -1: none, or it was reaped.
  pid_t child_ = -1;
  async::TaskGroup tasks_;
};

}  // namespace rekindle::keeper

// The agent's side, with a real keeper.
#include "recovery/keeper/keeper_link.h"

#include <csignal>
#include <fstream>
#include <optional>
#include <utility>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <gtest/gtest.h>

#include "recovery/keeper/keeper.h"
#include "src/ipc/channel.h"
#include "src/ipc/process_age.h"
#include "src/ipc/unix_socket.h"
#include "tests/support/must.h"
#include "tests/support/process.h"

namespace rekindle::keeper {
namespace {

using namespace std::chrono_literals;
using testing::eventually;
using testing::Process;

UniqueFd block_of(const std::string& text) {
  UniqueFd fd(::memfd_create("block", MFD_CLOEXEC));
  EXPECT_EQ(::write(fd.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  return fd;
}
std::string text_of(const UniqueFd& block) {
  std::string text(64, 0);
  const ssize_t got = ::pread(block.get(), text.data(), text.size(), 0);
  text.resize(got < 0 ? 0 : static_cast<std::size_t>(got));
  return text;
}
UniqueFd pidfd_of(pid_t pid) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

class KeeperLinkTest : public ::testing::Test, private KeeperEvents {
 protected:
  KeeperLinkTest() { ::chmod(directory_.path().c_str(), 0700); }
  ~KeeperLinkTest() override {
    end();
    if (const pid_t pid = keeper(); pid > 0) ::kill(pid, SIGKILL);
  }

  // The pid of the keeper that serves, of the socket's other end; 0: none.
  pid_t keeper() const {
    const auto fd = ipc::connect_unix_socket(socket(), steady_now() + 1s);
    if (!fd) return 0;
    const auto peer = ipc::peer_of(fd->get());
    return peer ? peer->pid : 0;
  }
  std::string socket() const { return directory_ / kKeeperSocket; }
  KeeperLinkOptions options() const {
    KeeperLinkOptions options;
    options.directory = directory_.path();
    options.program = KEEPER_MAIN;
    options.deadline = 10s;
    return options;
  }
  std::unique_ptr<KeeperLink> link_with(KeeperLinkOptions options) {
    auto link = std::make_unique<KeeperLink>(context_.get_executor(), std::move(options));
    link->tell_events(this);
    return link;
  }
  template <typename Done>
  bool until(Done done) {
    return eventually([&] {
      context_.restart();
      context_.run_for(2ms);
      return done();
    });
  }
  // Ends the link, as an agent that stops does.
  void end() {
    bool closed = false;
    boost::asio::co_spawn(
        context_,
        [](KeeperLink& link, bool& done) -> async::Task<void> {
          co_await link.close(5s);
          done = true;
        }(*link_, closed),
        boost::asio::detached);
    EXPECT_TRUE(until([&] { return closed; }));
    link_.reset();
  }
  // Another agent.
  void restart(KeeperLinkOptions options) {
    end();
    link_ = link_with(std::move(options));
  }
  template <typename T>
  std::optional<T> wait(async::Task<T> task) {
    const auto result = std::make_shared<std::optional<T>>();
    boost::asio::co_spawn(
        context_,
        [](async::Task<T> asked, std::shared_ptr<std::optional<T>> out) -> async::Task<void> {
          *out = co_await std::move(asked);
        }(std::move(task), result),
        boost::asio::detached);
    EXPECT_TRUE(until([&] { return result->has_value(); }));
    return std::move(*result);
  }
  Result<UserId> keep(const std::string& name, pid_t user,
                      std::chrono::milliseconds time_to_live = 60s) {
    KeeperLink::Order order;
    order.name = name;
    order.record = "record of " + name;
    order.blocks.push_back(block_of("first of " + name));
    order.blocks.push_back(block_of("second of " + name));
    order.user = pidfd_of(user);
    order.time_to_live = time_to_live;
    return *wait(link_->keep(std::move(order)));
  }
  std::map<std::string, std::vector<UserId>> list() { return must(*wait(link_->list())); }

  void user_gone(const std::string& copy, UserId user) override { gone_.emplace_back(copy, user); }
  void copy_expired(const std::string& copy) override { expired_.push_back(copy); }
  void keeper_lost(const Error&) override { ++lost_; }

  const testing::TempDir directory_;
  boost::asio::io_context context_;
  std::vector<std::pair<std::string, UserId>> gone_;
  std::vector<std::string> expired_;
  int lost_ = 0;
  std::unique_ptr<KeeperLink> link_ = link_with(options());
};

TEST_F(KeeperLinkTest, ACopyOutlivesTheAgentThatGaveIt) {
  Process worker({.argv = {"sleep", "1000"}});
  const UserId user = must(keep("a", worker.pid()));
  const pid_t before = keeper();

  restart(options());
  EXPECT_EQ(list(), (std::map<std::string, std::vector<UserId>>{{"a", {user}}}));
  const auto kept = must(*wait(link_->get("a")));
  EXPECT_EQ(kept.record, "record of a");
  ASSERT_EQ(kept.blocks.size(), 2u);
  EXPECT_EQ(text_of(kept.blocks[0]), "first of a");
  EXPECT_EQ(text_of(kept.blocks[1]), "second of a");
  ASSERT_EQ(kept.users.size(), 1u);
  EXPECT_EQ(kept.users.begin()->first, user);
  EXPECT_EQ(ipc::pid_of(kept.users.begin()->second.get()), worker.pid());
  EXPECT_EQ(keeper(), before);
  EXPECT_EQ(wait(link_->get("b"))->error().code(), ErrorCode::kNotFound);
}

TEST_F(KeeperLinkTest, TheDeathOfAUserIsToldAndBeginsTheTimeOfTheCopy) {
  Process worker({.argv = {"sleep", "1000"}});
  Process other({.argv = {"sleep", "1000"}});
  const UserId first = must(keep("a", worker.pid(), 1ms));
  const UserId second = must(*wait(link_->use("a", pidfd_of(other.pid()))));
  worker.kill();
  ASSERT_TRUE(until([&] { return !gone_.empty(); }));
  EXPECT_EQ(gone_.back(), std::make_pair(std::string("a"), first));
  EXPECT_EQ(list()["a"], std::vector<UserId>{second});
  EXPECT_TRUE(expired_.empty());
  other.kill();
  ASSERT_TRUE(until([&] { return !expired_.empty(); }));
  EXPECT_EQ(gone_.back().second, second);
  EXPECT_TRUE(list().empty());
}

TEST_F(KeeperLinkTest, AUserThatIsDeadAlreadyIsNoticed) {
  Process worker({.argv = {"sleep", "1000"}});
  UniqueFd dead = pidfd_of(worker.pid());
  worker.kill();
  KeeperLink::Order order;
  order.name = "a";
  order.blocks.push_back(block_of("x"));
  order.user = std::move(dead);
  order.time_to_live = 60s;
  const UserId user = must(*wait(link_->keep(std::move(order))));
  ASSERT_TRUE(until([&] { return !gone_.empty(); }));
  EXPECT_EQ(gone_.back().second, user);
  EXPECT_EQ(list()["a"].size(), 0u);
}

TEST_F(KeeperLinkTest, ACallKnowsItsUserBeforeItHearsOfItsDeath) {
  Process worker({.argv = {"sleep", "1000"}});
  UniqueFd dead = pidfd_of(worker.pid());
  worker.kill();
  std::size_t heard = 99;
  boost::asio::co_spawn(
      context_,
      [](KeeperLink& link, UniqueFd user, const auto& gone,
         std::size_t& count) -> async::Task<void> {
        KeeperLink::Order order;
        order.name = "a";
        order.blocks.push_back(block_of("x"));
        order.user = std::move(user);
        auto keeping = link.keep(std::move(order));
        (void)co_await std::move(keeping);
        count = gone.size();
      }(*link_, std::move(dead), gone_, heard),
      boost::asio::detached);
  ASSERT_TRUE(until([&] { return !gone_.empty(); }));
  EXPECT_EQ(heard, 0u);
}

TEST_F(KeeperLinkTest, WhatIsNoProcessIsNoUser) {
  for (const bool file : {true, false}) {
    KeeperLink::Order order;
    order.name = "a";
    order.blocks.push_back(block_of("x"));
    order.user = file ? block_of("not a process") : UniqueFd();
    EXPECT_EQ(wait(link_->keep(std::move(order)))->error().code(), ErrorCode::kInvalid);
  }
  EXPECT_TRUE(list().empty());
}

TEST_F(KeeperLinkTest, TheEndOfTheAgentEndsACallThatWaits) {
  Process worker({.argv = {"sleep", "1000"}});
  must(keep("a", worker.pid()));
  const pid_t pid = keeper();
  ::kill(pid, SIGSTOP);
  std::optional<ErrorCode> failed;
  boost::asio::co_spawn(
      context_,
      [](KeeperLink& link, std::optional<ErrorCode>& error) -> async::Task<void> {
        auto listing = link.list();
        const auto listed = co_await std::move(listing);
        error = listed.error().code();
      }(*link_, failed),
      boost::asio::detached);
  ASSERT_TRUE(until([] { return true; }));
  EXPECT_EQ(failed, std::nullopt);
  end();
  EXPECT_TRUE(failed.has_value());
  ::kill(pid, SIGCONT);
  link_ = link_with(options());
}

TEST_F(KeeperLinkTest, AUserMayLeaveAndACopyMayBeDropped) {
  Process worker({.argv = {"sleep", "1000"}});
  must(keep("a", worker.pid()));
  const UserId user = must(keep("b", worker.pid()));
  must(*wait(link_->leave("b", user)));
  EXPECT_EQ(list()["b"].size(), 0u);
  must(*wait(link_->drop("a")));
  const auto again = *wait(link_->drop("a"));
  EXPECT_EQ(again.error().code(), ErrorCode::kNotFound) << again.error().message();
  EXPECT_EQ(list().size(), 1u);
  // Its name is free, and its user is watched no more.
  must(keep("a", worker.pid()));
  worker.kill();
  ASSERT_TRUE(until([&] { return !gone_.empty(); }));
  EXPECT_EQ(gone_.size(), 1u);
}

TEST_F(KeeperLinkTest, AKilledKeeperIsToldAndReplacedByAnEmptyOne) {
  Process worker({.argv = {"sleep", "1000"}});
  must(keep("a", worker.pid()));
  const pid_t before = keeper();
  ::kill(before, SIGKILL);
  ASSERT_TRUE(until([&] { return lost_ == 1; }));
  EXPECT_TRUE(list().empty());
  EXPECT_NE(keeper(), before);
}

TEST_F(KeeperLinkTest, AStoppedKeeperFailsTheCallAndServesWhenItGoesOn) {
  Process worker({.argv = {"sleep", "1000"}});
  auto brief = options();
  brief.deadline = 300ms;
  must(keep("a", worker.pid()));
  const pid_t pid = keeper();
  ::kill(pid, SIGSTOP);
  restart(brief);
  EXPECT_EQ(wait(link_->list())->error().code(), ErrorCode::kTimeout);
  ::kill(pid, SIGCONT);
  restart(options());
  EXPECT_EQ(list().size(), 1u);
  EXPECT_EQ(keeper(), pid);
}

TEST_F(KeeperLinkTest, TwoAgentsThatStartOneShareIt) {
  auto first = std::exchange(link_, link_with(options()));
  std::optional<Result<std::map<std::string, std::vector<UserId>>>> seen;
  boost::asio::co_spawn(
      context_,
      [](KeeperLink& link, decltype(seen)& out) -> async::Task<void> {
        out = co_await link.list();
      }(*first, seen),
      boost::asio::detached);
  EXPECT_TRUE(list().empty());
  ASSERT_TRUE(until([&] { return seen.has_value(); }));
  EXPECT_TRUE(*seen);
  Process worker({.argv = {"sleep", "1000"}});
  must(keep("a", worker.pid()));
  EXPECT_EQ(must(*wait(first->list())).size(), 1u);
  end();
  link_ = std::move(first);
}

TEST_F(KeeperLinkTest, AnIdleKeeperEndsAndOneWithACopyStays) {
  auto brief = options();
  brief.idle = 1s;
  restart(brief);
  Process worker({.argv = {"sleep", "1000"}});
  must(keep("a", worker.pid(), 1ms));
  const pid_t pid = keeper();
  restart(options());
  context_.restart();
  context_.run_for(1500ms);
  EXPECT_EQ(::waitpid(pid, nullptr, WNOHANG), 0) << "it has ended";
  worker.kill();
  EXPECT_TRUE(eventually([&] { return ::waitpid(pid, nullptr, WNOHANG) == pid; }));
}

TEST_F(KeeperLinkTest, ManyBlocksOfOneCopyComeBackInOrder) {
  constexpr std::size_t kBlocks = 600;
  KeeperLink::Order order;
  order.name = "a";
  order.record = std::string(3 << 20, 'r');
  for (std::size_t i = 0; i < kBlocks; ++i) order.blocks.push_back(block_of(std::to_string(i)));
  order.user = pidfd_of(::getpid());
  must(*wait(link_->keep(std::move(order))));
  const auto kept = must(*wait(link_->get("a")));
  EXPECT_EQ(kept.record, std::string(3 << 20, 'r'));
  ASSERT_EQ(kept.blocks.size(), kBlocks);
  for (std::size_t i = 0; i < kBlocks; ++i) ASSERT_EQ(text_of(kept.blocks[i]), std::to_string(i));
}

TEST_F(KeeperLinkTest, StrangersDoNotDisturbIt) {
  Process worker({.argv = {"sleep", "1000"}});
  must(keep("a", worker.pid()));
  const auto connect = [&] {
    auto fd = must(ipc::connect_unix_socket(socket(), steady_now() + 5s));
    return must(ipc::Channel::adopt(std::move(fd), 0));
  };
  {
    auto garbage = connect();
    must(garbage.send("\xff\xff not a message", {}, steady_now() + 5s));
    EXPECT_EQ(garbage.receive(steady_now() + 5s).error().code(), ErrorCode::kPeerLost);
  }
  auto rude = connect();
  proto::AgentToKeeper frame;
  frame.set_call(1);
  frame.mutable_drop()->set_name("a");
  must(rude.send(frame.SerializeAsString(), {}, steady_now() + 5s));
  proto::KeeperToAgent answer;
  ASSERT_TRUE(answer.ParseFromString(must(rude.receive(steady_now() + 5s)).body));
  EXPECT_TRUE(answer.has_error()) << answer.ShortDebugString();
  frame.mutable_hello()->set_protocol_min(7);
  frame.mutable_hello()->set_protocol_max(9);
  must(rude.send(frame.SerializeAsString(), {}, steady_now() + 5s));
  ASSERT_TRUE(answer.ParseFromString(must(rude.receive(steady_now() + 5s)).body));
  EXPECT_TRUE(answer.has_error()) << answer.ShortDebugString();
  EXPECT_EQ(list().size(), 1u);
}

TEST_F(KeeperLinkTest, WithoutAProgramNobodyStartsOne) {
  auto alone = options();
  alone.program.clear();
  restart(alone);
  const auto listed = *wait(link_->list());
  ASSERT_FALSE(listed);
  EXPECT_EQ(keeper(), 0);
}

}  // namespace
}  // namespace rekindle::keeper

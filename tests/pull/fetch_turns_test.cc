// Pulls of one host that need the same metadata.
#include "recovery/pull/fetch_turns.h"

#include <optional>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/this_coro.hpp>
#include <gtest/gtest.h>

#include "tests/recovery/rpc_fixture.h"

namespace rekindle::pull {
namespace {

using Turn = std::unique_ptr<FetchTurns::Turn>;
using std::chrono::milliseconds;

const Digest kThis{{1}};
const Digest kOther{{2}};

class FetchTurnsTest : public ::testing::Test {
 protected:
  // A pull whose sources have sent nothing for this long, of a minute that it waits for them.
  struct Waiter {
    explicit Waiter(milliseconds silent = milliseconds(0))
        : silence(milliseconds(60'000), steady_now() - silent) {}
    std::optional<Turn> turn;
    Silence silence;
    boost::asio::cancellation_signal cancel;
  };
  void ask(Waiter& waiter, Digest what) {
    auto task = [](FetchTurns* turns, Digest wanted, Silence* silence) -> async::Task<Turn> {
      co_await boost::asio::this_coro::throw_if_cancelled(false);
      co_return co_await turns->take(wanted, *silence);
    };
    boost::asio::co_spawn(
        loop_.executor(), task(&turns_, what, &waiter.silence),
        boost::asio::bind_cancellation_slot(
            waiter.cancel.slot(),
            [&waiter](const std::exception_ptr&, Turn turn) { waiter.turn = std::move(turn); }));
  }
  // All that can happen without time passing has happened.
  void settle() {
    loop_.io().restart();
    while (loop_.io().poll() > 0) loop_.io().restart();
  }

  rpc::testing::Loop loop_;
  FetchTurns turns_{loop_.executor()};
  Waiter first_, second_, third_;
};

TEST_F(FetchTurnsTest, OnePullFetchesAThingAtATime) {
  ask(first_, kThis);
  ask(second_, kThis);
  ask(third_, kOther);
  settle();
  EXPECT_TRUE(first_.turn);
  EXPECT_FALSE(second_.turn);
  EXPECT_TRUE(third_.turn) << "another thing";
  first_.turn->reset();
  settle();
  EXPECT_TRUE(second_.turn);
}

TEST_F(FetchTurnsTest, ACancelledPullWaitsNoMore) {
  ask(first_, kThis);
  ask(second_, kThis);
  settle();
  second_.cancel.emit(boost::asio::cancellation_type::terminal);
  settle();
  EXPECT_TRUE(second_.turn);
}

TEST_F(FetchTurnsTest, APullWithoutProgressIsNotWaitedFor) {
  ask(first_, kThis);
  ask(second_, kThis);
  ask(third_, kThis);
  loop_.run_until([&] { return second_.turn.has_value() || third_.turn.has_value(); });
  // The one that lost patience fetches now, and the other waits for it.
  EXPECT_NE(second_.turn.has_value(), third_.turn.has_value());
  first_.turn->reset();
  settle();
  EXPECT_NE(second_.turn.has_value(), third_.turn.has_value()) << "the first turn is over already";
}

TEST_F(FetchTurnsTest, ProgressOfTheOtherPullIsNoSilence) {
  Waiter impatient(milliseconds(59'000));
  ask(first_, kThis);
  settle();
  (*first_.turn)->progress(steady_now());
  ask(impatient, kThis);
  settle();
  EXPECT_FALSE(impatient.turn);
  EXPECT_GT(impatient.silence.left(steady_now()), milliseconds(30'000));
}

TEST_F(FetchTurnsTest, WhatHasArrivedIsWaitedForHoweverLongItIsParsed) {
  ask(first_, kThis);
  settle();
  (*first_.turn)->progress(steady_now() - 10 * FetchTurns::kPatience);
  (*first_.turn)->arrived();
  ask(second_, kThis);
  settle();
  EXPECT_FALSE(second_.turn);
}

}  // namespace
}  // namespace rekindle::pull

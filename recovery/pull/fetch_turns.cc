#include "recovery/pull/fetch_turns.h"

#include <map>

#include <boost/asio/post.hpp>

namespace rekindle::pull {

struct FetchTurns::State {
  explicit State(const boost::asio::any_io_executor& on) : executor(on), changed(on) {}

  const boost::asio::any_io_executor executor;
  // The latest turn for each thing.
  std::map<Digest, Turn*> latest;
  async::Notifier changed;
};

FetchTurns::FetchTurns(const boost::asio::any_io_executor& executor)
    : state_(std::make_shared<State>(executor)) {}

FetchTurns::Turn::~Turn() {
  const auto found = turns_->latest.find(what_);
  // A later turn has replaced this one if its pull has lost patience.
  if (found != turns_->latest.end() && found->second == this) turns_->latest.erase(found);
  // Posted: at the end of the process the waiters may be gone already.
  boost::asio::post(turns_->executor, [turns = turns_] { turns->changed.notify(); });
}

bool FetchTurns::taken(const Digest& what) const { return state_->latest.contains(what); }

async::Task<std::unique_ptr<FetchTurns::Turn>> FetchTurns::take(Digest what, Silence& silence) {
  const auto state = state_;
  bool cancelled = false;
  while (true) {
    cancelled = co_await async::is_cancelled();
    const auto found = state->latest.find(what);
    if (cancelled || found == state->latest.end()) break;
    const Turn& other = *found->second;
    const TimePoint last = other.arrived_ ? steady_now() : other.last_progress_;
    silence.heard(last);
    if (steady_now() - last >= kPatience) break;
    co_await state->changed.wait_until(last + kPatience);
  }
  std::unique_ptr<Turn> turn(new Turn(state, what));
  // A cancelled pull fetches nothing that others could wait for.
  if (!cancelled) state->latest[what] = turn.get();
  co_return turn;
}

}  // namespace rekindle::pull

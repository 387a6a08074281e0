// Transfer: paths that take a handshake, and rails that come back.
#include <algorithm>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>

#include "recovery/pull/transfer.h"
#include "src/async/offload.h"
#include "src/base/log.h"

namespace rekindle::pull {

using transport::HandshakeConnector;
using transport::SourceIndex;

namespace {

constexpr std::chrono::milliseconds kHandshakeDeadline{3000};
constexpr Duration kFirstJoinPause = std::chrono::seconds(1);
constexpr Duration kLongestJoinPause = std::chrono::seconds(16);

using Begun = Result<std::shared_ptr<transport::Handshake>>;

}  // namespace

HandshakeConnector* Transfer::handshake_connector(const std::string& transport) const {
  for (auto* connector : environment_.handshakes) {
    if (connector->transport() == transport) return connector;
  }
  return nullptr;
}

// Making queue pairs takes system calls, and proving a link takes up to half a second: both on the
// blocking pool. The word with the peer is an ordinary call: a peer that does not answer holds up
// nobody else. What the peer offers by then is kept for the next time.
async::Task<Result<transport::Paths>> Transfer::shake_hands(SourceIndex index,
                                                            PeerSession::Offer offer,
                                                            std::vector<std::string> in_use) {
  HandshakeConnector* const connector = handshake_connector(offer.transport);
  if (hooks_.use_memory) hooks_.use_memory(*connector);
  const std::shared_ptr<SourcePeer> peer = sources_[index].peer;
  const SessionToken token = sources_[index].session->token;
  const transport::PathTarget target{offer.transport, offer.endpoint, token, peer->incarnation()};
  // Named, not temporaries: g++ 12 destroys captures of a temporary inside co_await twice.
  auto begin = [connector, &target, &in_use]() -> Begun {
    TRY(auto handshake, connector->begin(target, in_use));
    return std::shared_ptr<transport::Handshake>(std::move(handshake));
  };
  CO_TRY(const auto handshake,
         co_await async::offload(*environment_.blocking_pool, std::move(begin)));
  const auto deadline = silence_.at_most(kHandshakeDeadline, std::chrono::steady_clock::now());
  CO_TRY(const std::string answer,
         co_await peer->connect_paths(token, offer.transport, handshake->request(), deadline));
  auto finish = [handshake, &answer] {
    auto paths = handshake->finish(answer);
    using Shared = std::shared_ptr<transport::Paths>;
    if (!paths) return Result<Shared>(fail(std::move(paths).error()));
    return Result<Shared>(std::make_shared<transport::Paths>(std::move(*paths)));
  };
  const auto paths = co_await async::offload(*environment_.blocking_pool, std::move(finish));
  renew_offer(sources_[index], token, offer.transport, handshake->endpoint());
  if (!paths) co_return fail(paths.error());
  co_return std::move(**paths);
}

void Transfer::renew_offer(ActiveSource& source, const SessionToken& token,
                           const std::string& transport, const std::string& endpoint) {
  if (!source.session || source.session->token != token || endpoint.empty()) return;
  for (auto& offer : source.session->offers) {
    if (offer.transport == transport) offer.endpoint = endpoint;
  }
}

// A source that loses one of several rails goes on over the others: that is said, no more.
void Transfer::note_lost_rails(const transport::BatchProgress& progress) {
  std::vector<std::set<std::string>> alive(sources_.size());
  for (const auto& path : progress.paths) {
    if (path.alive && !path.home.empty()) alive[path.source].insert(path.home);
  }
  for (SourceIndex index = 0; index < sources_.size(); ++index) {
    ActiveSource& source = sources_[index];
    for (const std::string& rail : source.rails) {
      if (alive[index].contains(rail) || alive[index].empty()) continue;
      log::info("pull.rail_lost", "source", source.name, "rail", rail);
    }
    source.rails = std::move(alive[index]);
  }
}

// Sources whose paths are fewer than their rails: a rail that was down may be back, a source that
// was still registering its memory may have finished.
void Transfer::join_missing_rails() {
  const TimePoint now = std::chrono::steady_clock::now();
  for (SourceIndex index = 0; index < sources_.size(); ++index) {
    ActiveSource& source = sources_[index];
    const bool connected = source.session && source.peer != nullptr && source.peer->connected();
    if (!connected || source.connecting || source.joining || source.lost || source.slow) continue;
    const auto offer = std::find_if(source.session->offers.begin(), source.session->offers.end(),
                                    [&](const auto& candidate) {
                                      return handshake_connector(candidate.transport) != nullptr &&
                                             !source.avoid.contains(candidate.transport);
                                    });
    if (offer == source.session->offers.end() || source.transport == "shm") continue;
    if (source.next_join == TimePoint{}) {
      source.join_pause = kFirstJoinPause;
      source.next_join = now + source.join_pause;
    }
    if (now < source.next_join) continue;
    std::vector<std::string> in_use;
    for (const auto& path : batch_->progress().paths) {
      if (path.source == index && path.alive && !path.home.empty()) in_use.push_back(path.home);
    }
    ++connecting_;
    source.joining = true;
    boost::asio::co_spawn(environment_.executor, join_rails(index, *offer, std::move(in_use)),
                          boost::asio::detached);
  }
}

async::Task<void> Transfer::join_rails(SourceIndex index, PeerSession::Offer offer,
                                       std::vector<std::string> in_use) {
  ActiveSource& source = sources_[index];
  const SessionToken token = source.session->token;
  auto paths = co_await shake_hands(index, offer, std::move(in_use));
  const TimePoint now = std::chrono::steady_clock::now();
  const bool same_session = source.session && source.session->token == token && !source.lost;
  if (paths && !same_session) {
    // The source was lost meanwhile, which waits for no join: it is being connected anew, or gone.
    const auto late = std::make_shared<transport::Paths>(std::move(*paths));
    auto drop = [late] {
      late->clear();
      return true;
    };
    (void)co_await async::offload(*environment_.blocking_pool, std::move(drop));
  } else if (paths) {
    for (const auto& path : *paths) {
      log::info("pull.rail_joined", "source", source.name, "path", path->describe());
    }
    source.transport = offer.transport;
    source.used.insert(offer.transport);
    source.join_pause = kFirstJoinPause;
    add_paths(index, std::move(*paths));
  } else if (paths.error().code() != ErrorCode::kNotFound) {
    source.join_pause = std::min(source.join_pause * 2, kLongestJoinPause);
  }
  source.next_join = now + source.join_pause;
  source.joining = false;
  --connecting_;
  timer_->cancel();
}

}  // namespace rekindle::pull

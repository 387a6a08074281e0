#include "tests/sim/sim_pull.h"

#include <algorithm>

namespace rekindle::sim {

namespace {

constexpr Duration kPullCallDeadline = 3s;
constexpr Duration kReadDeadline = 700ms;
constexpr Duration kProgressEvery = 400ms;
constexpr Duration kSilence = 4s;
constexpr int kMostOpens = 40;
constexpr std::uint32_t kWrongToBan = 2;

}  // namespace

SimPull::SimPull(SimAgent& agent, std::string model, std::optional<std::uint64_t> version,
                 bool is_task)
    : agent_(agent),
      world_(agent.world_),
      model_(std::move(model)),
      version_(version),
      is_task_(is_task),
      number_(agent.next_pull_++) {}

// Answers find the pull through its agent, as it may have ended.
SimPull* SimPull::of(SimAgent& agent, std::uint64_t number) {
  return agent.pull_ != nullptr && agent.pull_->number_ == number ? agent.pull_.get() : nullptr;
}

void SimPull::open() {
  if (++opens_ > kMostOpens) return finish(false);
  OpenPullRequest request{agent_.info_, model_, version_, ""};
  // The version is resolved once.
  if (!id_.model.empty()) request.version = id_.version;
  SimAgent& agent = agent_;
  const std::uint64_t number = number_;
  world_.call<OpenedPull>(
      agent.process_, agent.coordinator_.process(), kPullCallDeadline,
      [&agent, request] { return agent.coordinator_.open_pull(request); },
      [&agent, number](Result<OpenedPull> answer) {
        if (of(agent, number) == nullptr) return;
        SimPull& self = *agent.pull_;
        const auto again = [&agent, number] {
          if (of(agent, number) == nullptr) return;
          agent.pull_->open();
        };
        if (!answer) {
          self.world_.trace("{} may not pull: {}", agent.name_, answer.error().message());
          const ErrorCode code = answer.error().code();
          const bool retry = code == ErrorCode::kUnavailable || code == ErrorCode::kTimeout;
          if (!retry) return self.finish(false);
          self.world_.in_process(agent.process_, 300ms, again);
        } else if (answer->sources.empty() && answer->retry_after > Duration::zero()) {
          self.world_.in_process(agent.process_, answer->retry_after, again);
        } else if (answer->sources.empty()) {  // it has it all itself, or had
          const auto held = agent.store_.find(answer->id);
          if (held != agent.store_.end() && held->second.committed) {
            self.id_ = answer->id;
            self.root_ = answer->version.root;
            return self.finish(held->second.root == answer->version.root);
          }
          self.world_.in_process(agent.process_, 300ms, again);
        } else {
          self.opened(*answer);
        }
      });
}

void SimPull::opened(const OpenedPull& opened) {
  if (!pull_id_.is_nil()) return;
  require(id_.model.empty() || id_ == opened.id, "{} asked for {} and was given {}", agent_.name_,
          id_.to_string(), opened.id.to_string());
  id_ = opened.id;
  root_ = opened.version.root;
  pull_id_ = opened.pull_id;
  last_byte_ = world_.now();
  const auto found = agent_.store_.find(id_);
  if (found != agent_.store_.end() && (found->second.committed || found->second.root != root_)) {
    return finish(found->second.root == root_);
  }
  if (found == agent_.store_.end()) {
    if (agent_.free_bytes() < kVersionBytes) return finish(false);
    agent_.store_[id_].root = root_;
  }
  SimAgent& agent = agent_;
  world_.in_process(agent.process_, kProgressEvery, [&agent, number = number_] {
    if (of(agent, number) == nullptr) return;
    agent.pull_->progress();
  });
  if (complete()) return finish(true);
  take_sources(opened.sources);
}

bool SimPull::complete() const { return std::ranges::all_of(copy().verified, std::identity{}); }

SimAgent* SimPull::host_of(const SourceOffer& offer) const {
  for (const auto& peer : agent_.peers_) {
    if (peer->info_.control_endpoint == offer.node.control_endpoint) return peer.get();
  }
  return nullptr;
}

void SimPull::take_sources(const std::vector<SourceOffer>& offers) {
  for (const SourceOffer& offer : offers) {
    Source& source = sources_[offer.grant.source];
    source.offer = offer;
    if (!source.session && !source.banned) dial(source);
  }
}

void SimPull::dial(Source& source) {
  SimAgent* host = host_of(source.offer);
  require(host != nullptr, "{} is offered and is nowhere", source.offer.node.node_id);
  SimAgent& agent = agent_;
  source.lost = false;
  const GrantTerms grant = source.offer.grant;
  world_.call<std::uint64_t>(
      agent.process_, host->process(), kReadDeadline,
      [host, grant, id = id_]() -> Served<std::uint64_t> { return host->open_session(grant, id); },
      [&agent, host, number = number_, from = grant.source](Result<std::uint64_t> session) {
        if (agent.pull_ == nullptr || agent.pull_->number_ != number) {
          if (session) host->close_session(*session);  // its connection ends with the pull
          return;
        }
        Source& it = agent.pull_->sources_.at(from);
        if (!session) return agent.pull_->lose(it);
        if (it.session) return host->close_session(*session);
        it.session = *session;
        agent.pull_->read_next(it);
      });
}

std::optional<std::size_t> SimPull::next_tile(const Source& source) const {
  for (std::size_t i = 0; i < kTiles; ++i) {
    if (copy().verified[i]) continue;
    const bool taken =
        std::ranges::any_of(sources_, [&](const auto& other) { return other.second.reading == i; });
    const bool held =
        source.offer.complete || std::ranges::any_of(source.offer.held, [&](const auto& run) {
          return run.first <= i && i < run.second;
        });
    if (!taken && held) return i;
  }
  return std::nullopt;
}

void SimPull::read_next(Source& source) {
  if (!source.session || source.reading || source.banned) return;
  source.reading = next_tile(source);
  if (!source.reading) return;
  require(!copy().verified[*source.reading], "{} fetches a verified tile again", agent_.name_);
  SimAgent* host = host_of(source.offer);
  SimAgent& agent = agent_;
  world_.call<std::uint64_t>(
      agent.process_, host->process(), kReadDeadline,
      [host, session = *source.session, tile = *source.reading]() -> Served<std::uint64_t> {
        return host->read(session, tile);
      },
      [&agent, number = number_, from = source.offer.grant.source,
       tile = *source.reading](Result<std::uint64_t> content) {
        if (of(agent, number) == nullptr) return;
        agent.pull_->got(from, tile, content);
      });
}

void SimPull::got(const Incarnation& from, std::size_t tile, const Result<std::uint64_t>& content) {
  Source& source = sources_.at(from);
  source.reading.reset();
  if (!content) {
    lose(source);
  } else if (*content != tile_of(root_, tile)) {
    ++source.failures;
    source.banned = ++source.wrong >= kWrongToBan;
  } else {
    copy().tiles[tile] = *content;
    copy().verified[tile] = true;
    source.bytes += kVersionBytes / kTiles;
    last_byte_ = world_.now();
    agent_.announce_due_ = true;
  }
  if (complete()) return finish(true);
  for (auto& [incarnation, other] : sources_) read_next(other);
}

void SimPull::lose(Source& source) {
  ++source.failures;
  source.lost = true;
  source.session.reset();
}

void SimPull::progress() {
  if (world_.now() - last_byte_ > kSilence) return finish(false);
  PullProgress progress{pull_id_, agent_.info_, id_, 0, kVersionBytes, {}};
  for (std::size_t i = 0; i < kTiles; ++i) {
    if (copy().verified[i]) progress.bytes_done += kVersionBytes / kTiles;
  }
  for (const auto& [incarnation, source] : sources_) {
    progress.sources.push_back({source.offer.node.node_id, incarnation, source.bytes,
                                static_cast<double>(source.bytes), source.failures, source.lost,
                                source.banned, ""});
  }
  SimAgent& agent = agent_;
  world_.call<PullProgressAnswer>(
      agent.process_, agent.coordinator_.process(), kPullCallDeadline,
      [&agent, progress] { return agent.coordinator_.pull_progress(progress); },
      [&agent, number = number_](Result<PullProgressAnswer> answer) {
        if (of(agent, number) == nullptr) return;
        if (answer) agent.pull_->take_sources(answer->sources);
        if (answer) {
          for (auto& [incarnation, source] : agent.pull_->sources_) {
            agent.pull_->read_next(source);
          }
        }
      });
  world_.in_process(agent.process_, kProgressEvery, [&agent, number = number_] {
    if (of(agent, number) == nullptr) return;
    agent.pull_->progress();
  });
}

void SimPull::finish(bool ok) {
  SimAgent& agent = agent_;
  world_.trace("{}'s pull of {} {}", agent_.name_, id_.model.empty() ? model_ : id_.to_string(),
               ok ? "is complete" : "ends without it");
  if (ok) {
    Copy& done = copy();
    for (std::size_t i = 0; i < kTiles; ++i) {
      require(done.verified[i] && done.tiles[i] == tile_of(root_, i),
              "{} commits {} with a tile that is not its own", agent.name_, id_.to_string());
    }
    done.committed = true;
  }
  for (const auto& [incarnation, source] : sources_) {
    if (SimAgent* host = host_of(source.offer); host != nullptr && source.session) {
      host->world_.send(agent.process_, host->process_,
                        [host, session = *source.session] { host->close_session(session); });
    }
  }
  if (!pull_id_.is_nil()) {
    world_.call<bool>(
        agent.process_, agent.coordinator_.process(), kPullCallDeadline,
        [&agent, id = pull_id_, self = agent.info().incarnation] {
          return agent.coordinator_.close_pull(id, self);
        },
        [](const Result<bool>&) {});
  }
  const ModelVersion id = id_.model.empty() ? ModelVersion{model_, version_.value_or(0)} : id_;
  agent.pull_ended(id, ok, is_task_);  // *this is gone
}

}  // namespace rekindle::sim

#include "tests/bench/spread_model.h"

#include <algorithm>

namespace rekindle::bench {

namespace {
// Rates are not exact.
constexpr double kNearlyBytes = 2.0;
}  // namespace

SpreadModel::SpreadModel(SpreadRates rates, const std::vector<std::vector<double>>& given,
                         std::vector<SpreadParty> parties)
    : rates_(rates), given_(given) {
  for (std::size_t i = 0; i < given.front().size(); ++i) {
    source_out_.push_back(links_.add_link(rates.host));
  }
  for (std::size_t host = 0; host < given.size(); ++host) {
    host_in_.push_back(links_.add_link(rates.host));
    host_out_.push_back(links_.add_link(rates.host));
    fetches_.emplace_back(source_out_.size());
    const auto fetching = links_.add_link(rates.fetch);
    for (std::size_t source = 0; source < source_out_.size(); ++source) {
      if (given[host][source] <= 0) continue;
      auto& fetch = fetches_[host][source];
      fetch = links_.start({source_out_[source], host_in_[host], fetching}, given[host][source]);
      on_end_[fetch] = [this, &fetch] {
        fetch = 0;
        fetched_ = now_;
      };
    }
  }
  for (SpreadParty& from : parties) {
    Party& party = parties_.emplace_back();
    party.share_bytes = from.share_bytes;
    party.buckets = from.buckets;
    party.uploaded.resize(from.buckets);
    for (SpreadRank& plan : from.ranks) {
      party.ranks.push_back(ranks_.size());
      Rank& rank = ranks_.emplace_back();
      rank.plan = std::move(plan);
      rank.party = parties_.size() - 1;
      rank.in = links_.add_link(rates.gpu);
      rank.out = links_.add_link(rates.gpu);
      rank.released.resize(from.buckets);
    }
  }
}

double SpreadModel::run() {
  for (std::size_t i = 0; i < ranks_.size(); ++i) upload_next(i);
  while (!on_end_.empty() || !later_.empty()) step();
  return ended_;
}

void SpreadModel::step() {
  double wait = links_.next_end();
  if (!later_.empty()) wait = std::min(wait, std::max(0.0, later_.top().when - now_));
  for (const Rank& rank : ranks_) {
    if (rank.waits_for_fetch) wait = std::min(wait, fetch_wait(rank));
  }
  now_ += wait;
  ++events_;
  for (const LinkModel::FlowId id : links_.advance(wait)) {
    const auto act = on_end_.extract(id);
    act.mapped()();
  }
  while (!later_.empty() && later_.top().when <= now_) {
    const Act act = later_.top().act;
    later_.pop();
    act();
  }
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    if (!rank.waits_for_fetch || !is_fetched(rank, rank.next_upload)) continue;
    rank.waits_for_fetch = false;
    at(now_ + rates_.fetched, [this, i] { upload(i); });
  }
}

void SpreadModel::at(double when, Act act) { later_.push({when, ++events_, std::move(act)}); }

void SpreadModel::flow(std::vector<LinkModel::LinkId> links, double bytes, Act act) {
  if (bytes <= 0) return at(now_, std::move(act));
  on_end_[links_.start(std::move(links), bytes)] = std::move(act);
}

bool SpreadModel::is_fetched(const Rank& rank, std::size_t bucket) const {
  const std::size_t host = rank.plan.host;
  for (std::size_t source = 0; source < source_out_.size(); ++source) {
    const auto fetch = fetches_[host][source];
    const double there = fetch == 0 ? given_[host][source] : links_.moved(fetch);
    if (there + kNearlyBytes < rank.plan.needs[bucket][source]) return false;
  }
  return true;
}

double SpreadModel::fetch_wait(const Rank& rank) {
  const std::size_t host = rank.plan.host;
  double wait = 0;
  for (std::size_t source = 0; source < source_out_.size(); ++source) {
    const auto fetch = fetches_[host][source];
    if (fetch == 0) continue;
    const double missing = rank.plan.needs[rank.next_upload][source] - links_.moved(fetch);
    if (missing > 0) wait = std::max(wait, missing / links_.rate(fetch));
  }
  return wait;
}

void SpreadModel::upload_next(std::size_t index) {
  Rank& rank = ranks_[index];
  const std::size_t bucket = rank.next_upload;
  if (rank.busy || bucket == parties_[rank.party].buckets) return;
  if (bucket >= rates_.slots && !rank.released[bucket - rates_.slots]) return;
  rank.busy = true;
  if (is_fetched(rank, bucket)) {
    upload(index);
  } else {
    rank.waits_for_fetch = true;
  }
}

void SpreadModel::upload(std::size_t index) {
  Rank& rank = ranks_[index];
  flow({rank.in}, rank.plan.upload_bytes[rank.next_upload], [this, index] {
    Rank& done = ranks_[index];
    done.busy = false;
    ++parties_[done.party].uploaded[done.next_upload++];
    ring_next(done.party);
    upload_next(index);
  });
}

void SpreadModel::ring_next(std::size_t index) {
  Party& party = parties_[index];
  if (party.busy || party.next_ring == party.buckets) return;
  if (party.uploaded[party.next_ring] < party.ranks.size()) return;
  party.busy = true;
  at(now_ + rates_.spread_start, [this, index] { ring(index); });
}

// Each rank receives the shares of all others, and sends as much.
void SpreadModel::ring(std::size_t index) {
  const Party& party = parties_[index];
  std::vector<LinkModel::LinkId> links;
  for (const std::size_t i : party.ranks) {
    const Rank& rank = ranks_[i];
    links.insert(links.end(),
                 {host_in_[rank.plan.host], host_out_[rank.plan.host], rank.in, rank.out});
  }
  const double bytes = party.share_bytes * static_cast<double>(party.ranks.size() - 1);
  flow(std::move(links), bytes, [this, index] {
    Party& done = parties_[index];
    done.busy = false;
    const std::size_t bucket = done.next_ring++;
    for (const std::size_t rank : done.ranks) spread_over(rank, bucket);
    ring_next(index);
  });
}

void SpreadModel::spread_over(std::size_t index, std::size_t bucket) {
  const Party& party = parties_[ranks_[index].party];
  const double verified =
      now_ + party.share_bytes * static_cast<double>(party.ranks.size()) / rates_.verify;
  const double passing = party.share_bytes * static_cast<double>(party.ranks.size() - 1);
  const auto release = [this, index, bucket] {
    ranks_[index].released[bucket] = true;
    upload_next(index);
  };
  at(verified, [this, index, passing, release] {
    Rank& rank = ranks_[index];
    ended_ = std::max(ended_, now_ + rates_.release);
    rank.passed += passing;
    if (rank.kept + passing > now_ * rates_.keep ||
        rank.passed + rank.kept + passing > now_ * rates_.keep_and_pass) {
      return at(now_ + rates_.release, release);
    }
    rank.kept += passing;
    kept_bytes_ += passing;
    flow({rank.out}, passing, [this, release] { at(now_ + rates_.release, release); });
  });
}

}  // namespace rekindle::bench

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <queue>
#include <utility>
#include <vector>

#include "tests/bench/link_model.h"

namespace rekindle::bench {

// Bytes per second and seconds.
struct SpreadRates {
  // Of all NICs of a host together, each way.
  double host = 8 * 50e9;
  // What a host fetches at most.
  double fetch = 8 * 50e9;
  // Of the link of each GPU, each way. The NIC reaches the GPU over it, too.
  double gpu = 50e9;
  // Digests on a GPU.
  double verify = 1e12;
  // Passing bytes that each device copies to host memory.
  double keep = 8e9;
  // Kept and passing bytes together.
  double keep_and_pass = 32e9;
  // A collective: its launch and its hops.
  double spread_start = 100e-6;
  // From a verified bucket to its release by the worker.
  double release = 500e-6;
  // From the last byte of a bucket's share to its upload: digests of its tiles, and the news.
  double fetched = 2e-3;
  std::size_t slots = 3;
};

// One rank of a party, which owns a share.
struct SpreadRank {
  std::size_t host = 0;
  // Of each bucket of the share.
  std::vector<double> upload_bytes;
  // Of each bucket and source: the position in the bytes that the source gives to this host, from
  // which on the share of the bucket is there.
  std::vector<std::vector<double>> needs;
};
struct SpreadParty {
  double share_bytes = 0;
  std::size_t buckets = 0;
  std::vector<SpreadRank> ranks;
};

// A round with fetching owners in virtual time (docs/internals/rounds.md): sources give bytes to
// hosts, each owner uploads its share of a bucket when that is there, a ring spreads the bucket
// when all owners have uploaded, then each rank verifies, keeps and releases it.
class SpreadModel {
 public:
  // `given`: bytes from each source to each host, [host][source].
  SpreadModel(SpreadRates rates, const std::vector<std::vector<double>>& given,
              std::vector<SpreadParty> parties);

  // Seconds until the last rank has its last bucket.
  double run();
  // Seconds until the last byte was fetched.
  double fetched() const { return fetched_; }
  double kept_bytes() const { return kept_bytes_; }
  // Bytes that hosts have received and sources have sent.
  double host_in(std::size_t host) const { return links_.carried(host_in_[host]); }
  double source_out(std::size_t source) const { return links_.carried(source_out_[source]); }
  std::uint64_t events() const { return events_; }

 private:
  struct Rank {
    SpreadRank plan;
    std::size_t party = 0;
    LinkModel::LinkId in = 0;
    LinkModel::LinkId out = 0;
    std::size_t next_upload = 0;
    bool busy = false;
    bool waits_for_fetch = false;
    std::vector<bool> released;
    double kept = 0;
    double passed = 0;
  };
  struct Party {
    double share_bytes = 0;
    std::size_t buckets = 0;
    std::vector<std::size_t> ranks;
    std::vector<std::size_t> uploaded;
    std::size_t next_ring = 0;
    bool busy = false;
  };
  using Act = std::function<void()>;

  void at(double when, Act act);
  void flow(std::vector<LinkModel::LinkId> links, double bytes, Act act);
  bool is_fetched(const Rank& rank, std::size_t bucket) const;
  double fetch_wait(const Rank& rank);
  void upload_next(std::size_t rank);
  void upload(std::size_t rank);
  void ring_next(std::size_t party);
  void ring(std::size_t party);
  void spread_over(std::size_t rank, std::size_t bucket);
  void step();

  const SpreadRates rates_;
  LinkModel links_;
  std::vector<LinkModel::LinkId> host_in_;
  std::vector<LinkModel::LinkId> host_out_;
  std::vector<LinkModel::LinkId> source_out_;
  // [host][source]; 0: nothing to give, or all is given.
  std::vector<std::vector<LinkModel::FlowId>> fetches_;
  std::vector<std::vector<double>> given_;
  std::vector<Rank> ranks_;
  std::vector<Party> parties_;
  std::map<LinkModel::FlowId, Act> on_end_;
  struct Later {
    double when = 0;
    std::uint64_t order = 0;
    Act act;
    bool operator<(const Later& other) const {
      return std::pair(when, order) > std::pair(other.when, other.order);
    }
  };
  std::priority_queue<Later> later_;
  double now_ = 0;
  double fetched_ = 0;
  double ended_ = 0;
  double kept_bytes_ = 0;
  std::uint64_t events_ = 0;
};

}  // namespace rekindle::bench

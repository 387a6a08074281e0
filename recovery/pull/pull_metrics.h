#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "recovery/metrics/metrics.h"
#include "recovery/pull/pull_policy.h"
#include "recovery/pull/pull_types.h"
#include "src/base/result.h"
#include "transport/engine.h"

namespace rekindle::pull {

inline constexpr std::array<std::string_view, 7> kPullPhases{
    "resolve", "plan", "allocate", "connect", "transfer", "verify", "commit"};

// Where the bytes of a batch land.
enum class Landing { kHost, kGpu };

// The metrics of all pulls of this process. Control thread only.
class PullMetrics {
 public:
  explicit PullMetrics(metrics::Metrics& metrics);

  void began() { started_.Increment(); }
  void failed(const Error& why) { outcomes_.count(fail(why)); }
  void succeeded(const TransferSummary& summary);
  void lost_source(SourceState::Loss loss);

 private:
  friend class MovedBytes;
  struct Rail {
    prometheus::Counter& bytes;
    prometheus::Counter& seconds;
  };
  // `rail`: the NIC of this host, "" where the transport knows none. Hosts have few NICs.
  Rail counters_of(const std::string& transport, const std::string& rail, Landing landing);

  prometheus::Counter& started_;
  metrics::OutcomeCounters outcomes_;
  prometheus::Histogram& took_;
  std::map<std::string_view, prometheus::Histogram*> phases_;
  metrics::Counters& moved_;
  metrics::Counters& moving_;
  prometheus::Counter& resumed_bytes_;
  prometheus::Counter& refetched_bytes_;
  prometheus::Counter& retried_;
  prometheus::Counter& stolen_;
  prometheus::Counter& lost_;
  prometheus::Counter& quarantined_;
};

// Adds the progress of one batch to the counters, as often as somebody looks at it.
class MovedBytes {
 public:
  // nullptr: nothing is counted.
  explicit MovedBytes(PullMetrics* metrics, Landing landing = Landing::kHost)
      : metrics_(metrics), landing_(landing) {}
  void look(const transport::BatchProgress& progress);

 private:
  struct Rail {
    PullMetrics::Rail counters;
    std::uint64_t bytes = 0;
    Duration busy{0};
  };

  PullMetrics* const metrics_;
  const Landing landing_;
  // As in BatchProgress::rails.
  std::vector<Rail> rails_;
  std::uint64_t retried_ = 0;
  std::uint64_t stolen_ = 0;
};

}  // namespace rekindle::pull

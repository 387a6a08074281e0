#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "recovery/coordinator/core/types.h"

namespace rekindle::coordinator {

// A puller's report on one of its sources. Numbers count from the start of the pull.
struct SourceReport {
  std::string node_id;
  Incarnation incarnation;
  std::uint64_t bytes = 0;
  double goodput_bytes_per_second = 0;
  std::uint32_t failures = 0;
  bool lost = false;
  // The source served wrong bytes twice.
  bool quarantine = false;
  std::string cause;
};

// The last reports of one pull, by source. Reports repeat earlier ones, so each loss and each
// quarantine counts once per pull.
class SourceReports {
 public:
  struct News {
    bool failed = false;
    bool delivered = false;
    bool lost = false;
    bool quarantined = false;
  };
  // The facts in `report` that the last report on this source did not have.
  News news_in(const SourceReport& report) const;
  void keep(const SourceReport& report);
  const std::vector<SourceReport>& all() const { return reports_; }

 private:
  // Its index in `reports_`, or their number when there is none.
  std::size_t find(const SourceReport& report) const;

  std::vector<SourceReport> reports_;
};

// The goodput of a source beside the other sources of the same pullers: 1 is as good as they are, 0
// gives nothing. A bad mark fades, so that an unused source is tried again. Each party that reports
// has its own view. For the others counts only what two parties agree on: one alone may have a bad
// link, or lie.
class SourceHealth {
 public:
  // `party`: see NodeInfo. `relative`: the rate over the median of the sources of the same puller.
  void observe(const std::string& party, double relative, TimePoint now);
  // For a puller of this party. "": for anybody.
  double at(TimePoint now, const std::string& party = {}) const;
  bool slow(TimePoint now, const std::string& party = {}) const;

 private:
  struct View {
    double value = 1;
    TimePoint seen{};

    double at(TimePoint now) const;
  };
  std::map<std::string, View> views_;
};

// The standing of one node as a source, by the reports of its pullers. A lost source counts as
// suspect for some seconds. A party that got wrong bytes gets the source no more for a while. Once
// two parties have, the source is in quarantine for all, twice as long each time: one party alone
// may have bad memory, or lie.
class SourceStanding {
 public:
  void lost(const Timing& timing, TimePoint now) { lost_until_ = now + timing.lost_report; }
  bool is_lost(TimePoint now) const { return lost_until_ > now; }
  // `party`: who is responsible for the puller (see NodeInfo::party).
  void strike(const Incarnation& puller, const std::string& party, const Timing& timing,
              TimePoint now);
  TimePoint quarantined_until() const { return quarantined_until_; }
  bool quarantined(TimePoint now) const { return quarantined_until_ > now; }
  // This puller has found it bad lately.
  bool struck_by(const Incarnation& puller, TimePoint now) const;
  // A puller of this party has lost it without a byte: a port that answers nothing costs each pull
  // its patience. Pullers of the party get it as a last resort for a while, twice as long each
  // time.
  void gave_nothing(const std::string& party, const Timing& timing, TimePoint now);
  // It has given the party some bytes.
  void delivered(const std::string& party) { silences_.erase(party); }
  bool gives_nothing(const std::string& party, TimePoint now) const;
  // This puller does not get it before.
  TimePoint kept_from_until(const Incarnation& puller) const;

  SourceHealth health;

 private:
  TimePoint lost_until_{};
  TimePoint quarantined_until_{};
  // Doubles with each strike, up to the maximum.
  static Duration backoff(std::uint32_t strikes, const Timing& timing);

  struct Accusation {
    TimePoint at{};
    // Its pullers do not get the source before.
    TimePoint until{};
    std::uint32_t strikes = 0;
    std::set<Incarnation> pullers;
  };
  struct Silence {
    TimePoint until{};
    std::uint32_t times = 0;
  };
  // By party.
  std::map<std::string, Accusation> accusations_;
  std::map<std::string, Silence> silences_;
  std::uint32_t quarantines_ = 0;
};

}  // namespace rekindle::coordinator

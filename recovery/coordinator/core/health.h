#pragma once

#include "src/base/clock.h"

namespace rekindle::coordinator {

// A source as pullers see it beside the others that they read from at the same time: 1 is as good
// as they are, 0 gives nothing. Forgets: who is not read from gets another try.
class SourceHealth {
 public:
  // `relative`: its rate over the median of the sources of the same puller.
  void observe(double relative, TimePoint now);
  double at(TimePoint now) const;
  bool slow(TimePoint now) const;

 private:
  double value_ = 1;
  TimePoint seen_{};
};

}  // namespace rekindle::coordinator

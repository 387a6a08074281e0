#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/base/clock.h"

namespace rekindle::scale {

// The cost of the coordinator's core: the processor time inside its calls, and the memory that was
// allocated inside them and is not free yet. meter.cc replaces operator new for that.
class Meter {
 public:
  // Memory that is allocated while a Scope lives counts as the core's.
  class Scope {
   public:
    Scope(Meter& meter, Duration virtual_time);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Meter& meter_;
    const std::size_t second_;
    const std::int64_t began_ns_;
  };

  std::uint64_t calls() const { return calls_; }
  double cpu_seconds() const;
  // Of one core, in the busiest second of virtual time.
  double busiest_share() const;
  std::size_t peak_bytes() const { return peak_bytes_; }

 private:
  std::uint64_t calls_ = 0;
  // By second of virtual time.
  std::vector<std::int64_t> cpu_ns_;
  std::size_t peak_bytes_ = 0;
};

}  // namespace rekindle::scale

#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

// Where tests of label `rdma` run: tests/rdma/run says it in the environment
// (docs/internals/rdma-tests.md).
namespace rekindle::testing {

// Names of RDMA devices: a[i] and b[i] reach each other, over a cable of its own for each i where
// there are cables; on a host's own NICs a[i] may be b[i]. REKINDLE_RDMA_A and _B, else the first
// device that has an active port, for both sides. Both are empty where there is none: skip the test
// then.
struct Rails {
  std::vector<std::string> a, b;
};
Rails rdma_rails();

// Whether cables can be cut here: in the emulated machine, not on NICs that others use.
bool rdma_cables_can_fail();

// What may happen to a cable, as `lab` takes it (tests/rdma/guest/lab): {"cut", "0"}, {"lose", "1",
// "5"}. All of it is undone by the destructor. Throws std::runtime_error when it cannot be done.
class CableFault {
 public:
  explicit CableFault(std::initializer_list<std::string_view> arguments);
  ~CableFault();
  CableFault(const CableFault&) = delete;
  CableFault& operator=(const CableFault&) = delete;

  // Now, not at the end; throws when the cable does not come back.
  void repair();

 private:
  std::string cable_;
  bool repaired_ = false;
};

}  // namespace rekindle::testing

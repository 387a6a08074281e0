#include "src/ipc/forked_processes.h"

#include <csignal>

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "tests/support/process.h"

namespace rekindle::ipc {
namespace {

const auto kNobody = [](pid_t) { return false; };

// Sleeps without an exec until it is killed.
class Child {
 public:
  Child() : pid_(::fork()) {
    if (pid_ > 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) ::pause();
  }
  ~Child() { end(); }
  pid_t pid() const { return pid_; }
  void end() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  pid_t pid_;
};

class ForkedProcesses : public ::testing::Test {
 protected:
  ForkedProcesses() { files_.emplace_back(::memfd_create("block", MFD_CLOEXEC)); }

  std::vector<UniqueFd> files_;
  const Lineage self_ = lineage_of(::getpid()).value();
};

TEST_F(ForkedProcesses, AChildWithAnOpenFileIsFoundUntilItEnds) {
  const auto ids = ids_of(files_);
  ASSERT_EQ(ids.size(), 1u);
  Child child;
  const auto not_self = [](pid_t pid) { return pid == ::getpid(); };
  EXPECT_EQ(find_heir(self_, ids, not_self), child.pid());
  EXPECT_EQ(find_heir(self_, ids, [](pid_t) { return true; }), std::nullopt);
  child.end();
  EXPECT_EQ(find_heir(self_, ids, not_self), std::nullopt);
}

TEST_F(ForkedProcesses, AChildWithoutTheFileIsNone) {
  const auto ids = ids_of(files_);
  files_.clear();
  const Child child;
  EXPECT_EQ(find_heir(self_, ids, kNobody), std::nullopt);
}

TEST_F(ForkedProcesses, AnotherProgramRunIsNone) {
  rekindle::testing::Process other({.argv = {"sleep", "1000"}});
  const auto lineage = lineage_of(other.pid());
  ASSERT_TRUE(lineage);
  EXPECT_NE(lineage->stack, self_.stack);
  EXPECT_EQ(find_heir(*lineage, ids_of(files_), kNobody), std::nullopt);
}

TEST_F(ForkedProcesses, AParentThatIsOlderIsNone) {
  Lineage later = self_;
  later.started += 1'000'000;
  EXPECT_EQ(find_heir(later, ids_of(files_), kNobody), std::nullopt);
}

TEST_F(ForkedProcesses, OfAProcessThatHasEndedNothingIsKnown) {
  EXPECT_EQ(lineage_of(0).has_value(), false);
}

}  // namespace
}  // namespace rekindle::ipc

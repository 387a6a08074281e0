#include "src/ipc/process_age.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "src/base/unique_fd.h"

namespace rekindle::ipc {
namespace {

using namespace std::chrono_literals;

TEST(ProcessAge, IsTheTimeSinceTheStartInTheKernelsTicks) {
  const char* const stat =
      "71 (a) b (c)) S 1 71 71 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 250 99 98 97";
  EXPECT_EQ(age_of_process(stat, 10s, 100), Duration(7500ms));
  EXPECT_EQ(age_of_process(stat, 1s, 100), Duration(0)) << "a clock that was read before";
}

TEST(ProcessAge, IsNotKnownOfATextThatIsCut) {
  EXPECT_EQ(age_of_process("", 10s, 100), std::nullopt);
  EXPECT_EQ(age_of_process("71 (a) S 1 71", 10s, 100), std::nullopt);
  EXPECT_EQ(age_of_process("71 (a", 10s, 100), std::nullopt);
}

TEST(ProcessAge, OfAProcessThatIsGoneIsNotKnown) {
  EXPECT_TRUE(age_of_process(::getpid()));
  EXPECT_FALSE(age_of_process(0));
}

TEST(ProcessAge, APidfdTellsItsProcess) {
  const UniqueFd self(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  EXPECT_EQ(pid_of(self.get()), ::getpid());
  const UniqueFd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(pid_of(file.get()), std::nullopt);
}

}  // namespace
}  // namespace rekindle::ipc

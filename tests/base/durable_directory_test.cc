// That the entries survive a power cut is shown by tests/power.
#include "src/base/durable_directory.h"

#include <fstream>

#include <sys/stat.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/process.h"

namespace rekindle {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

TEST(DurableDirectory, MakesWhatIsMissingAboveAndKeepsTheLastOnePrivate) {
  const testing::TempDir tmp;
  const fs::path path = tmp / "a/b/c";
  ASSERT_TRUE(make_directory_durably(path));
  struct stat status {};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700u);
}

TEST(DurableDirectory, TakesADirectoryThatIsThereAsItIs) {
  const testing::TempDir tmp;
  fs::create_directories(tmp / "a");
  fs::permissions(tmp / "a", fs::perms::owner_all | fs::perms::group_read);
  ASSERT_TRUE(make_directory_durably((tmp / "a").string() + "/"));
  EXPECT_EQ(fs::status(tmp / "a").permissions(), fs::perms::owner_all | fs::perms::group_read);
}

TEST(DurableDirectory, NamesTheFileThatIsInItsPlace) {
  const testing::TempDir tmp;
  std::ofstream(tmp / "file") << "x";
  const auto made = make_directory_durably(tmp / "file");
  ASSERT_FALSE(made);
  EXPECT_THAT(made.error().message(), HasSubstr((tmp / "file").string() + " is not a directory"));
  EXPECT_FALSE(make_directory_durably(tmp / "file/below"));
}

}  // namespace
}  // namespace rekindle

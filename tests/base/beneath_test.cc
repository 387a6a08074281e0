#include "src/base/beneath.h"

#include <filesystem>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gmock/gmock.h>

#include "tests/support/process.h"

namespace rekindle {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class Beneath : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::create_directory(temp_ / "in");
    fs::create_directory(temp_ / "outside");
    auto opened = open_directory(temp_ / "in");
    ASSERT_TRUE(opened) << opened.error().message();
    in_ = std::move(*opened);
  }
  testing::TempDir temp_;
  UniqueFd in_;
};

TEST_F(Beneath, ANewFileReplacesALinkAndLeavesItsTargetAlone) {
  testing::write_file(temp_ / "outside/victim", "mine");
  fs::create_symlink(temp_ / "outside/victim", temp_ / "in/config.json");
  fs::create_symlink(temp_ / "outside/victim", temp_ / "in/config.json.partial");
  ASSERT_TRUE(replace_beneath(in_.get(), "config.json", "{}"));
  EXPECT_EQ(testing::read_file(temp_ / "outside/victim"), "mine");
  EXPECT_EQ(testing::read_file(temp_ / "in/config.json"), "{}");
  struct stat status {};
  ASSERT_EQ(::lstat((temp_ / "in/config.json").c_str(), &status), 0);
  EXPECT_TRUE(S_ISREG(status.st_mode));
  EXPECT_EQ(status.st_mode & 0133u, 0u) << "neither executable nor writable by others";
  EXPECT_FALSE(fs::exists(fs::symlink_status(temp_ / "in/config.json.partial")));
}

TEST_F(Beneath, ALinkOnTheWayIsRefused) {
  fs::create_symlink(temp_ / "outside", temp_ / "in/folder");
  const auto folder = make_beneath(in_.get(), "folder");
  ASSERT_FALSE(folder);
  EXPECT_EQ(folder.error().code(), ErrorCode::kDenied);
  EXPECT_THAT(folder.error().message(), HasSubstr("folder is a symbolic link"));
  EXPECT_FALSE(open_beneath(in_.get(), "folder/file", O_WRONLY | O_CREAT, 0644));
  EXPECT_TRUE(fs::is_empty(temp_ / "outside"));
}

TEST_F(Beneath, NamesThatLeaveTheDirectoryAreRefused) {
  for (const auto& name : {std::string("../outside/file"), (temp_ / "outside/file").string()}) {
    EXPECT_FALSE(open_beneath(in_.get(), name, O_WRONLY | O_CREAT, 0644)) << name;
  }
  EXPECT_TRUE(fs::is_empty(temp_ / "outside"));
}

// Whoever owns the parent may put another directory under the name meanwhile.
TEST_F(Beneath, WritesGoToTheDirectoryThatWasOpened) {
  fs::rename(temp_ / "in", temp_ / "moved");
  fs::create_symlink(temp_ / "outside", temp_ / "in");
  ASSERT_TRUE(replace_beneath(in_.get(), "file", "x"));
  EXPECT_TRUE(fs::is_empty(temp_ / "outside"));
  EXPECT_EQ(testing::read_file(temp_ / "moved/file"), "x");
}

}  // namespace
}  // namespace rekindle

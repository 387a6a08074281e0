#include "src/store/huge_pages.h"

#include "tests/store/mount_namespace.h"
#include "tests/store/store_fixture.h"

namespace rekindle::store {
namespace {

using ::testing::HasSubstr;

TEST(FindTmpfs, TakesTheInnermostMountAndReadsItsOption) {
  const std::string mounts =
      "20 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
      "25 20 0:22 / /dev/shm rw,nosuid shared:3 master:1 - tmpfs tmpfs rw,size=64k,inode64\n"
      "30 25 0:40 / /dev/shm/my\\040store rw - tmpfs rekindle rw,huge=within_size,mode=700\n"
      "nonsense\n"
      "31 20 8:2 / /dev/shm/disk rw - ext4 /dev/sdb rw\n";
  EXPECT_EQ(find_tmpfs(mounts, "/dev/shm/a/b")->at, "/dev/shm");
  EXPECT_FALSE(find_tmpfs(mounts, "/dev/shm/a/b")->gives_huge_pages());
  EXPECT_EQ(find_tmpfs(mounts, "/dev/shm/my store/x")->huge, "within_size");
  EXPECT_EQ(find_tmpfs(mounts, "/dev/shm/my store2")->at, "/dev/shm");
  EXPECT_FALSE(find_tmpfs(mounts, "/dev/shm/disk/a"));
  EXPECT_FALSE(find_tmpfs(mounts, "/home"));
  EXPECT_FALSE(find_tmpfs("", "/dev/shm"));
  // A later mount at the same place covers the earlier one.
  EXPECT_FALSE(find_tmpfs(mounts + "32 25 8:3 / /dev/shm rw - ext4 /dev/sdc rw\n", "/dev/shm/a"));
}

class HugePagesTest : public StoreTest {
 protected:
  fs::path small() const { return temp_.path() / "small"; }
};

TEST_F(HugePagesTest, AMountOfItsOwnGivesTheStoreHugePages) {
  on_small_tmpfs(small(), [&] {
    const fs::path directory = small() / "s";
    const auto mounted = mount_huge_pages(directory);
    if (!mounted && mounted.error().code() == ErrorCode::kUnavailable) return;  // such a kernel
    ASSERT_TRUE(mounted) << mounted.error().message();
    ASSERT_TRUE(mount_huge_pages(directory)) << "a second time";
    store_ = open_store(directory, 0);
    auto segment = store_->create_segment(directory / "pool" / "x.safetensors", 8 * kMiB);
    ASSERT_TRUE(segment) << segment.error().message();
    const HugeBytes counted = count_huge_bytes(directory);
    EXPECT_EQ(counted.all, 8 * kMiB);
    EXPECT_EQ(counted.huge, 8 * kMiB);
    // As large as the file system below it.
    EXPECT_EQ(store_->budget_bytes(), 18 * kMiB);
  });
}

TEST_F(HugePagesTest, AStoreThatIsThereIsNotHiddenByAMount) {
  on_small_tmpfs(small(), [&] {
    const fs::path directory = small() / "s";
    store_ = open_store(directory);
    const auto refused = mount_huge_pages(directory);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code(), ErrorCode::kInvalid);
    EXPECT_THAT(refused.error().message(),
                HasSubstr("`mount -o remount,huge=within_size " + small().string() + "`"));
    EXPECT_TRUE(fs::exists(directory / "lock"));
    auto segment = store_->create_segment(directory / "pool" / "x.safetensors", 4 * kMiB);
    ASSERT_TRUE(segment) << segment.error().message();
    EXPECT_EQ(count_huge_bytes(directory).huge, 0u);
    EXPECT_EQ(count_huge_bytes(directory).all, 4 * kMiB);
  });
}

// In a container the copies in such a mount outlive it; those in a new mount would not.
TEST_F(HugePagesTest, AMountThatSomebodyElseMadeIsNotCovered) {
  on_small_tmpfs(small(), [&] {
    const auto refused = mount_huge_pages(small());
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code(), ErrorCode::kInvalid);
    EXPECT_THAT(refused.error().message(), HasSubstr("is mounted without huge pages"));
  });
}

TEST_F(HugePagesTest, ADiskHasNone) {
  const auto refused = mount_huge_pages("/proc/rekindle");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kInvalid);
}

}  // namespace
}  // namespace rekindle::store

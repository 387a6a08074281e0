// The memory of versions that went, which the next ones take with its pages and pins.
#include <sys/stat.h>

#include "tests/gpu/gpu_workers.h"

namespace rekindle::testing {
namespace {

class MemoryOfVersions : public GpuWorkers {
 protected:
  // The store's own files, not links of ours.
  void publish_copy(const std::string& version, const Checkpoint& checkpoint) {
    checkpoint.write(fleet_.dir(version));
    const auto done = fleet_.run_command(
        {"publish", version, fleet_.dir(version), "--store", fleet_.agent("a").store});
    ASSERT_EQ(done.exit_code, 0) << done.err;
    std::filesystem::remove_all(fleet_.dir(version));
  }
  void retire(const std::string& version) {
    const auto done = fleet_.run_command({"retire", version, "--store", fleet_.agent("a").store});
    ASSERT_EQ(done.exit_code, 0) << done.err;
  }
  ino_t inode() {
    struct stat status {};
    const auto path = find_file(fleet_.agent("a").store / "models", "model.safetensors");
    EXPECT_EQ(::stat(path.c_str(), &status), 0);
    return status.st_ino;
  }
  std::uint64_t pinned() { return devices().value("pinned_bytes", std::uint64_t{0}); }

  const Checkpoint old_ = plain_checkpoint(8, 51);
  const Checkpoint new_ = plain_checkpoint(8, 52);
};

TEST_F(MemoryOfVersions, IsUsedAgainWithItsPins) {
  start_agent();
  ASSERT_NO_FATAL_FAILURE(publish_copy("m@1", old_));
  const auto one = worker();
  expect_loads(*one, "attach m@1", old_.sums());
  EXPECT_TRUE(is_ok(one->ask("detach")));
  const auto before = inode();
  const auto pins = pinned();
  EXPECT_GE(pins, 8u << 20);
  ASSERT_NO_FATAL_FAILURE(retire("m@1"));
  EXPECT_EQ(pinned(), pins);
  ASSERT_NO_FATAL_FAILURE(publish_copy("m@2", new_));
  EXPECT_EQ(inode(), before);
  EXPECT_EQ(pinned(), pins);
  expect_loads(*one, "attach m@2", new_.sums());
}

TEST_F(MemoryOfVersions, ThatNobodyTakesIsUnpinnedWhenItsFileGoes) {
  start_agent();
  ASSERT_NO_FATAL_FAILURE(publish_copy("m@1", old_));
  EXPECT_TRUE(eventually([&] { return pinned() >= 8u << 20; })) << devices();
  const auto store = fleet_.agent("a").store;
  ASSERT_NO_FATAL_FAILURE(retire("m@1"));
  for (const auto& file : std::filesystem::directory_iterator(store / "pool")) {
    std::filesystem::remove(file.path());
  }
  EXPECT_TRUE(eventually([&] { return pinned() == 0; })) << devices();
}

}  // namespace
}  // namespace rekindle::testing

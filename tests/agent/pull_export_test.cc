// `pull --to DIR`: only files whose bytes have verified get a name in DIR.
#include "recovery/agent/pull_export.h"

#include <fstream>
#include <thread>

#include "src/base/failpoint.h"
#include "tests/store/store_fixture.h"

namespace rekindle::agent {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// A whole copy in the store inside DIR, which is closed, as after the pull.
class ExportTest : public store::StoreTest, public ::testing::WithParamInterface<store::Evidence> {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    store_ = std::move(*store::SegmentStore::open(
        {.directory = export_store(target()), .pool_bytes = 0, .evidence = GetParam()}));
    copy_ = pull(store::all_boxes(*checkpoint()));
    store_.reset();
  }
  void TearDown() override { ASSERT_TRUE(arm_failpoints("")); }
  fs::path target() const { return temp_.path() / "out"; }
  fs::path weights() const { return copy_->segments[0]->path(); }
  fs::path exported() const { return target() / weights().filename(); }
  // Another file of the same size gets the name.
  void replace() const {
    const fs::path other = temp_.path() / "other";
    fs::copy_file(weights(), other);
    flip(other);
    fs::rename(other, weights());
  }
  static void flip(const fs::path& path) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1, std::ios::end);
    const char last = static_cast<char>(file.get());
    file.seekp(-1, std::ios::end);
    file.put(static_cast<char>(last ^ 1));
    ASSERT_TRUE(file.flush());
  }
  template <typename T>
  void expect_refused(const Result<T>& exported_result) const {
    ASSERT_FALSE(exported_result);
    EXPECT_EQ(exported_result.error().code(), ErrorCode::kCorrupt)
        << exported_result.error().message();
    EXPECT_FALSE(fs::exists(target() / "rekindle.manifest")) << "nothing vouches for DIR";
    EXPECT_FALSE(fs::exists(exported())) << "nobody takes it for weights";
  }

  std::shared_ptr<const store::StoredVersion> copy_;
};
INSTANTIATE_TEST_SUITE_P(Evidence, ExportTest,
                         ::testing::Values(store::Evidence::kLeases, store::Evidence::kStamps),
                         [](const auto& test) {
                           return test.param == store::Evidence::kLeases ? "Leases" : "Stamps";
                         });

TEST_P(ExportTest, ACopyThatNobodyTouchedIsExported) {
  const auto done = export_checkpoint(*copy_, target(), false);
  ASSERT_TRUE(done) << done.error().message();
  EXPECT_TRUE(fs::exists(target() / "rekindle.manifest"));
  EXPECT_EQ(store::read_bytes(target() / "config.json"), R"({"model_type":"test"})");
  EXPECT_FALSE(fs::exists(export_store(target())));
}

TEST_P(ExportTest, B8AFileThatWasReplacedAfterTheCommitIsNotExported) {
  replace();
  const auto done = export_checkpoint(*copy_, target(), false);
  expect_refused(done);
  EXPECT_THAT(done.error().message(), HasSubstr("replaced by another file"));
}

TEST_P(ExportTest, B8AFileThatWasWrittenToAfterTheCommitIsNotExported) {
  ::usleep(20'000);  // the clock that stamps files has moved on
  flip(weights());
  expect_refused(export_checkpoint(*copy_, target(), false));
}

TEST_P(ExportTest, B8AFileThatIsReplacedWhileItIsExportedIsNotExported) {
  ASSERT_TRUE(arm_failpoints("export.before_link=hold@1"));
  Result<std::vector<std::string>> done;
  std::thread exporting([&] { done = export_checkpoint(*copy_, target(), false); });
  while (!fs::exists(export_store(target()) / "exporting")) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  replace();
  ASSERT_TRUE(arm_failpoints(""));
  exporting.join();
  expect_refused(done);
}

TEST_P(ExportTest, B8AFileThatIsReplacedOnceItIsInItsPlaceIsNotVouchedFor) {
  ASSERT_TRUE(arm_failpoints("export.after_weights=hold@1"));
  Result<std::vector<std::string>> done;
  std::thread exporting([&] { done = export_checkpoint(*copy_, target(), false); });
  while (!fs::exists(exported())) std::this_thread::yield();
  const fs::path other = temp_.path() / "other";
  store::write_bytes(other, "mine");
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  fs::rename(other, exported());
  ASSERT_TRUE(arm_failpoints(""));
  exporting.join();
  expect_refused(done);
}

}  // namespace
}  // namespace rekindle::agent

// What users are told when memory cannot be registered; and pages faulted in.
#include "transport/verbs/memory/registration_limit.h"

#include <algorithm>
#include <cerrno>

#include <sys/resource.h>
#include <sys/stat.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/verbs/registrar_fixture.h"
#include "transport/verbs/memory/page_touch.h"

namespace rekindle::transport::verbs {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr LockLimit kEightMiB{.limit_bytes = 8 * kMiB, .pinned_bytes = 6 * kMiB};

TEST(RegistrationLimit, ENOMEMIsTheMemlockLimitWhereThatIsTooSmall) {
  EXPECT_EQ(find_cause({.error = ENOMEM, .bytes = 3 * kMiB, .lock = kEightMiB}), Cause::kMemlock);
  EXPECT_EQ(find_cause({.error = ENOMEM, .bytes = 2 * kMiB, .lock = kEightMiB}),
            Cause::kDeviceFull);
  LockLimit capable = kEightMiB;
  capable.may_lock_any = true;
  EXPECT_EQ(find_cause({.error = ENOMEM, .bytes = 3 * kMiB, .lock = capable}), Cause::kDeviceFull);
  EXPECT_EQ(find_cause({.error = ENOMEM, .bytes = kGiB, .lock = {}}), Cause::kDeviceFull);
}

TEST(RegistrationLimit, OtherErrorsHaveTheirOwnCauses) {
  EXPECT_EQ(find_cause({.error = ENOMEM, .registered = 9, .max_mr = 9}), Cause::kRegionCount);
  EXPECT_EQ(find_cause({.error = EFAULT, .cut_short = true}), Cause::kCutShort);
  EXPECT_EQ(find_cause({.error = EFAULT, .no_writable_mapping = true}), Cause::kReadOnly);
  EXPECT_EQ(find_cause({.error = ENODEV}), Cause::kDeviceGone);
  EXPECT_EQ(find_cause({.error = EINVAL}), Cause::kOther);
}

TEST(RegistrationLimit, TheMessageNamesBytesLimitAndRemedy) {
  const Error error = to_error({.cause = Cause::kMemlock,
                                .error = ENOMEM,
                                .device = "mlx5_0",
                                .devices = 8,
                                .region_bytes = 5 * kGiB,
                                .registered_bytes = kGiB,
                                .missing_bytes = 4 * kGiB,
                                .lock = kEightMiB});
  EXPECT_EQ(error.code(), ErrorCode::kExhausted);
  EXPECT_EQ(
      error.message(),
      "mlx5_0: 4.00 GiB of 5.00 GiB not registered (1.00 GiB are): Cannot allocate memory: the "
      "memlock limit is 8.00 MiB and 6.00 MiB are pinned already; all of it needs 40.0 GiB "
      "(8 devices): `ulimit -l unlimited` (systemd: LimitMEMLOCK=infinity) or CAP_IPC_LOCK");
  EXPECT_EQ(to_error({.cause = Cause::kReadOnly, .error = EFAULT}).code(), ErrorCode::kDenied);
}

TEST(RegistrationLimit, TheProcessKnowsItsOwn) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_MEMLOCK, &before), 0);
  rlimit lower = before;
  lower.rlim_cur = std::min<rlim_t>(before.rlim_cur, 64 * kKiB);
  ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &lower), 0);
  const LockLimit lock = read_lock_limit();
  ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &before), 0);
  EXPECT_EQ(lock.limit_bytes, lower.rlim_cur);
}

std::uint64_t resident_blocks(const MappedFile& file) {
  struct stat now {};
  EXPECT_EQ(::fstat(file.fd.get(), &now), 0);
  return static_cast<std::uint64_t>(now.st_blocks) * 512;
}

class PageTouchWays
    : public ::testing::TestWithParam<int (*)(std::span<const std::byte>, TouchMode)> {};

TEST_P(PageTouchWays, MakesEveryPagePresent) {
  const MappedFile file(kMiB, PROT_READ | PROT_WRITE);
  EXPECT_EQ(resident_blocks(file), 0u);
  // Also the page of the last byte.
  EXPECT_EQ(GetParam()(file.bytes.subspan(100, kMiB / 2), TouchMode::kWrite), 0);
  EXPECT_GE(resident_blocks(file), kMiB / 2 + kPageBytes);
}

TEST_P(PageTouchWays, ChangesNoByte) {
  const MappedFile file(kMiB, PROT_READ | PROT_WRITE);
  for (std::size_t i = 0; i < file.bytes.size(); ++i) file.bytes[i] = std::byte(i * 13 % 255);
  for (const TouchMode mode : {TouchMode::kRead, TouchMode::kWrite}) {
    ASSERT_EQ(GetParam()(file.bytes, mode), 0);
  }
  for (std::size_t i = 0; i < file.bytes.size(); ++i) {
    ASSERT_EQ(file.bytes[i], std::byte(i * 13 % 255));
  }
}

TEST_P(PageTouchWays, BeyondTheEndOfTheFileIsAnErrorAndNoCrash) {
  const MappedFile file(kMiB, PROT_READ | PROT_WRITE);
  file.truncate(kMiB / 2);
  for (const TouchMode mode : {TouchMode::kRead, TouchMode::kWrite}) {
    EXPECT_EQ(GetParam()(file.bytes, mode), EFAULT);
    EXPECT_EQ(GetParam()(file.bytes.first(kMiB / 2), mode), 0);
    EXPECT_EQ(GetParam()({}, mode), 0);
  }
}

TEST_P(PageTouchWays, ReadOnlyMappingsAreTouchedByReading) {
  const MappedFile file(kMiB, PROT_READ);
  EXPECT_EQ(GetParam()(file.bytes, TouchMode::kRead), 0);
}

TEST(PageTouch, AReadOnlyMappingIsNotTouchedByWriting) {
  const MappedFile file(kMiB, PROT_READ);
  EXPECT_EQ(touch_pages(file.bytes, TouchMode::kWrite), 0) << "left to the device";
}

INSTANTIATE_TEST_SUITE_P(All, PageTouchWays,
                         ::testing::Values(&touch_pages, &touch_pages_one_by_one),
                         [](const auto& test) {
                           return std::string(test.index == 0 ? "AtOnce" : "OneByOne");
                         });

}  // namespace
}  // namespace rekindle::transport::verbs

#include "tools/cli/arguments.h"

#include <gtest/gtest.h>

#include "tests/support/process.h"
#include "tools/cli/cli_session.h"

namespace rekindle::cli {
namespace {

using std::chrono::milliseconds;

TEST(Arguments, DurationsHaveAUnitUnlessTheyAreZero) {
  EXPECT_EQ(parse_duration("--x", "0").value(), milliseconds(0));
  EXPECT_EQ(parse_duration("--x", "0s").value(), milliseconds(0));
  EXPECT_EQ(parse_duration("--x", "250ms").value(), milliseconds(250));
  EXPECT_EQ(parse_duration("--x", "1.5s").value(), milliseconds(1500));
  EXPECT_EQ(parse_duration("--x", "2min").value(), milliseconds(120'000));
  for (const char* bad : {"", "5", "s", "-1s", "1d", "1 s", "nan s", "nans", "1e99s", "inf s"}) {
    const auto parsed = parse_duration("--x", bad);
    ASSERT_FALSE(parsed) << bad;
    EXPECT_EQ(parsed.error().code(), ErrorCode::kInvalid);
    EXPECT_TRUE(parsed.error().message().starts_with("--x: ")) << parsed.error().message();
  }
}

TEST(Arguments, SizesNameTheirOption) {
  EXPECT_EQ(parse_size("--budget", "1.5G").value(), 1536ULL << 20);
  EXPECT_TRUE(parse_size("--budget", "lots").error().message().starts_with("--budget: "));
}

TEST(Arguments, AVersionIsRequiredWhereOneIsMeant) {
  EXPECT_EQ(parse_model_version("qwen3@41").value(), (ModelVersion{"qwen3", 41}));
  EXPECT_EQ(parse_model_version("qwen3").error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(parse_model_version("qwen3@").error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(parse_model_version("@1").error().code(), ErrorCode::kInvalid);
}

TEST(Arguments, TextFilesAreBounded) {
  const testing::TempDir dir;
  testing::write_file(dir / "small", "text");
  EXPECT_EQ(read_text_file(dir / "small").value(), "text");
  testing::write_file(dir / "large", std::string((16 << 20) + 1, 'x'));
  EXPECT_EQ(read_text_file(dir / "large").error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(read_text_file(dir / "absent").error().code(), ErrorCode::kNotFound);
  EXPECT_FALSE(read_text_file(dir.path()));
}

TEST(ExitCodes, TellWhatToDoNext) {
  EXPECT_EQ(exit_code(ErrorCode::kInvalid), 2);
  EXPECT_EQ(exit_code(ErrorCode::kNotFound), 3);
  EXPECT_EQ(exit_code(ErrorCode::kCorrupt), 4);
  EXPECT_EQ(exit_code(ErrorCode::kTimeout), 5);
  EXPECT_EQ(exit_code(ErrorCode::kExhausted), 6);
  EXPECT_EQ(exit_code(ErrorCode::kDenied), 7);
  EXPECT_EQ(exit_code(ErrorCode::kInternal), 1);
}

}  // namespace
}  // namespace rekindle::cli

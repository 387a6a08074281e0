#include "tools/cli/output.h"

#include <gtest/gtest.h>

namespace rekindle::cli {
namespace {

TEST(Output, ColumnsAreAsWideAsTheirWidestCell) {
  EXPECT_EQ(
      table({{"NAME"}, {"BYTES", true}, {"LAST"}}, {{"a", "1", "x"}, {"longer", "12345678", ""}}),
      "NAME       BYTES  LAST\n"
      "a              1  x\n"
      "longer  12345678\n");
}

TEST(Output, NoControlCharacterPasses) {
  EXPECT_EQ(printable("a\x1b[2Jb\n\x7f"), "a\\x1b[2Jb\\x0a\\x7f");
  EXPECT_EQ(printable("gew\xc3\xb6hnlich"), "gew\xc3\xb6hnlich");
  EXPECT_EQ(printable("a\u202eb\u2028\u2066"), "a\\xe2\\x80\\xaeb\\xe2\\x80\\xa8\\xe2\\x81\\xa6");
  EXPECT_EQ(printable("\u2013\u20ac"), "\u2013\u20ac");
  EXPECT_EQ(printable("a\xc2\x9b"
                      "2Jb\xc2\xa0"),
            "a\\xc2\\x9b2Jb\xc2\xa0")
      << "CSI in one character";
  EXPECT_EQ(printable("\x9b"
                      "2J\xc3"),
            "\\x9b2J\\xc3")
      << "no UTF-8";
}

TEST(Output, ErrorsAsJsonHaveCodeAndMessage) {
  const Json json = to_json(Error(ErrorCode::kNotFound, "no source"));
  EXPECT_EQ(json["error"]["message"], "no source");
  EXPECT_EQ(json["error"]["code"], std::string(to_string(ErrorCode::kNotFound)));
}

TEST(Output, SummariesCarryEveryFigure) {
  pull::TransferSummary summary;
  summary.id = {"m", 3};
  summary.bytes = 2'000'000;
  summary.elapsed = std::chrono::milliseconds(500);
  summary.phases = {{"plan", std::chrono::microseconds(1500)}};
  summary.sources = {{"b", "tcp", 7, 1.5, true, "gone"}};
  const Json json = to_json(summary);
  EXPECT_EQ(json["version"], 3);
  EXPECT_DOUBLE_EQ(json["bytes_per_second"], 4e6);
  EXPECT_DOUBLE_EQ(json["phases_ms"]["plan"], 1.5);
  EXPECT_EQ(json["sources"][0]["cause"], "gone");
  EXPECT_EQ(describe_sources(summary.sources), "b tcp 7 B (lost: gone)");
}

}  // namespace
}  // namespace rekindle::cli

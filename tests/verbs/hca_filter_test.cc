#include "transport/verbs/host/hca_filter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rekindle::transport::verbs {
namespace {

using ::testing::HasSubstr;

struct Case {
  const char* filter;
  const char* device;
  std::uint8_t port;
  bool allowed;
};

// NCCL's results for the same text.
TEST(HcaFilter, ReadsWhatNcclReads) {
  constexpr Case kCases[] = {
      {"", "mlx5_0", 1, true},
      {"mlx5", "mlx5_0", 1, true},
      {"mlx5", "mlx4_0", 1, false},
      {"mlx5_1", "mlx5_1", 2, true},
      {"mlx5_1", "mlx5_10", 1, true},  // prefixes
      {"=mlx5_1", "mlx5_10", 1, false},
      {"=mlx5_1", "mlx5_1", 1, true},
      {"mlx5_0:1,mlx5_2", "mlx5_0", 1, true},
      {"mlx5_0:1,mlx5_2", "mlx5_0", 2, false},
      {"mlx5_0:1,mlx5_2", "mlx5_2", 7, true},
      {"mlx5_0:1,mlx5_2", "mlx5_1", 1, false},
      {"=mlx5_0:1,mlx5_1:2", "mlx5_1", 2, true},  // one sign for the whole list
      {"=mlx5_0:1,mlx5_1:2", "mlx5_10", 2, false},
      {"^mlx5_3", "mlx5_3", 1, false},
      {"^mlx5_3", "mlx5_31", 1, false},
      {"^mlx5_3", "mlx5_0", 1, true},
      {"^=mlx5_3", "mlx5_31", 1, true},
      {"^=mlx5_3,mlx5_4", "mlx5_4", 1, false},
      {"^mlx5_3:1", "mlx5_3", 1, false},
      {"^mlx5_3:1", "mlx5_3", 2, true},
      {"mlx5_0:255", "mlx5_0", 255, true},
  };
  for (const Case& c : kCases) {
    const auto filter = HcaFilter::parse(c.filter);
    ASSERT_TRUE(filter) << filter.error().message();
    EXPECT_EQ(filter->allows(c.device, c.port), c.allowed)
        << "'" << c.filter << "' on " << c.device << ":" << int{c.port};
  }
}

TEST(HcaFilter, OnlyDevicesWithNoAllowedPortAreLeftClosed) {
  const auto may = [](const char* filter, const char* device) {
    return HcaFilter::parse(filter)->may_allow(device);
  };
  EXPECT_TRUE(may("", "mlx5_0"));
  EXPECT_TRUE(may("mlx5_0:2", "mlx5_0"));
  EXPECT_FALSE(may("mlx5_0:2", "mlx5_1"));
  EXPECT_FALSE(may("^mlx5_0", "mlx5_0"));
  EXPECT_TRUE(may("^mlx5_0:2", "mlx5_0"));  // its other ports are allowed
  EXPECT_FALSE(may("^mlx5_0:2,mlx5_0", "mlx5_0"));
}

TEST(HcaFilter, TextThatIsNoFilterIsRefusedInOneLine) {
  for (const char* text : {"^", "=", "^=", ",", "mlx5_0,", ",mlx5_0", "mlx5_0:", "mlx5_0:0",
                           "mlx5_0:256", "mlx5_0:-1", "mlx5_0:1x", "mlx5_0:1:2", "mlx5 0", "=^mlx5",
                           "mlx5_0,=mlx5_1", "mlx5_0,^mlx5_1", "^^mlx5", "a\nb", ":1"}) {
    const auto filter = HcaFilter::parse(text);
    ASSERT_FALSE(filter) << text;
    EXPECT_EQ(filter.error().code(), ErrorCode::kInvalid);
    EXPECT_THAT(filter.error().message(), HasSubstr("write NAME[:PORT]")) << text;
  }
}

}  // namespace
}  // namespace rekindle::transport::verbs

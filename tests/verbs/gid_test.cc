#include "transport/verbs/host/gid.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rekindle::transport::verbs {
namespace {

using ::testing::HasSubstr;

GidEntry entry(std::uint32_t index, const char* gid, GidType type = GidType::kRoceV2) {
  return {index, type, parse_sysfs_gid(gid).value()};
}

constexpr const char* kIpv4 = "0000:0000:0000:0000:0000:ffff:0a00:0003";
constexpr const char* kAutoIpv4 = "0000:0000:0000:0000:0000:ffff:a9fe:0102";
constexpr const char* kIpv6 = "2001:0db8:0000:0000:0000:0000:0000:0001";
constexpr const char* kUniqueLocal = "fd00:0000:0000:0000:0000:0000:0000:0001";
constexpr const char* kLinkLocal = "fe80:0000:0000:0000:0270:ebff:fe01:0203";

int choose(const std::vector<GidEntry>& entries, int wanted = -1) {
  const auto choice = choose_gid(entries, LinkLayer::kEthernet, wanted);
  return choice ? choice->index : -1;
}

TEST(Gid, KindsAreToldApartByAllTwelveLeadingBytes) {
  EXPECT_EQ(kind_of(entry(0, kIpv4).gid), GidKind::kIpv4);
  EXPECT_EQ(kind_of(entry(0, kAutoIpv4).gid), GidKind::kIpv4LinkLocal);
  EXPECT_EQ(kind_of(entry(0, kUniqueLocal).gid), GidKind::kIpv6);
  EXPECT_EQ(kind_of(entry(0, kLinkLocal).gid), GidKind::kIpv6LinkLocal);
  EXPECT_EQ(kind_of(Gid{}), GidKind::kNone);
  for (std::size_t i = 0; i < 12; ++i) {  // nearly mapped is not mapped
    Gid gid = entry(0, kIpv4).gid;
    gid[i] ^= 0x01U;
    EXPECT_NE(kind_of(gid), GidKind::kIpv4) << "byte " << i;
  }
}

TEST(Gid, VersionTwoAndIpv4ComeFirst) {
  std::vector<GidEntry> entries = {entry(0, kLinkLocal, GidType::kRoceV1), entry(1, kLinkLocal),
                                   entry(2, kIpv4, GidType::kRoceV1), entry(3, kIpv4),
                                   entry(4, kIpv6)};
  EXPECT_EQ(choose(entries), 3);
  entries.erase(entries.begin() + 3);
  EXPECT_EQ(choose(entries), 4);
  entries.pop_back();
  EXPECT_EQ(choose(entries), 1);
  EXPECT_EQ(choose({entry(0, kLinkLocal), entry(1, kAutoIpv4)}), 1);
  EXPECT_EQ(choose({entry(0, kAutoIpv4), entry(1, kUniqueLocal)}), 1);
  EXPECT_EQ(choose({entry(9, kIpv4), entry(5, kIpv4)}), 5);  // whatever the order of the table
}

TEST(Gid, NothingOfVersionTwoIsNothingUsable) {
  const std::vector<GidEntry> entries = {entry(0, kIpv4, GidType::kRoceV1),
                                         {1, GidType::kRoceV2, Gid{}},
                                         entry(256, kIpv4)};  // no address vector holds 256
  const auto choice = choose_gid(entries, LinkLayer::kEthernet, -1);
  ASSERT_FALSE(choice);
  EXPECT_EQ(choice.error().code(), ErrorCode::kNotFound);
  EXPECT_THAT(choice.error().message(), HasSubstr("no RoCE v2 GID"));
}

TEST(Gid, AnIndexThatIsGivenIsUsedOrRefused) {
  const std::vector<GidEntry> entries = {entry(0, kIpv4), entry(1, kLinkLocal),
                                         entry(2, kIpv4, GidType::kRoceV1)};
  EXPECT_EQ(choose(entries, 1), 1);
  const auto missing = choose_gid(entries, LinkLayer::kEthernet, 7);
  EXPECT_EQ(missing.error().code(), ErrorCode::kInvalid);
  EXPECT_THAT(missing.error().message(), HasSubstr("GID index 7 is empty"));
  const auto old = choose_gid(entries, LinkLayer::kEthernet, 2);
  EXPECT_EQ(old.error().code(), ErrorCode::kInvalid);
  EXPECT_THAT(old.error().message(), HasSubstr("RoCE v1"));
}

TEST(Gid, TheCurrentOneStaysUntilABetterKindComes) {
  const GidChoice current{5, entry(5, kLinkLocal).gid, ""};
  const auto next = [&](std::vector<GidEntry> entries) {
    return int{choose_gid(entries, LinkLayer::kEthernet, -1, &current)->index};
  };
  constexpr const char* kOther = "fe80:0000:0000:0000:0000:0000:0000:0009";
  EXPECT_EQ(next({entry(1, kOther), entry(5, kLinkLocal)}), 5);
  EXPECT_EQ(next({entry(1, kOther), entry(5, kOther)}), 1);  // same index, another address
  EXPECT_EQ(next({entry(5, kLinkLocal), entry(8, kIpv4)}), 8);
}

TEST(Gid, InfinibandUsesTheDefaultOneWhateverIndexIsGiven) {
  const std::vector<GidEntry> entries = {entry(1, kIpv6, GidType::kInfiniBand),
                                         entry(0, kLinkLocal, GidType::kInfiniBand)};
  EXPECT_EQ(choose_gid(entries, LinkLayer::kInfiniBand, 3)->index, 0);
  EXPECT_FALSE(choose_gid({}, LinkLayer::kInfiniBand, -1));
}

TEST(Gid, MappedOnesArePrintedAsIpv4) {
  EXPECT_EQ(format_gid(entry(0, kIpv4).gid), "10.0.0.3");
  EXPECT_EQ(format_gid(entry(0, kAutoIpv4).gid), "169.254.1.2");
  EXPECT_EQ(format_gid(entry(0, kLinkLocal).gid), "fe80::270:ebff:fe01:203");
}

TEST(Gid, SysfsTextIsParsedWhollyOrNot) {
  for (const char* text :
       {"", "fe80", "fe80:0000:0000:0000:0270:ebff:fe01:020",
        "fe80:0000:0000:0000:0270:ebff:fe01:02g3", "fe80:0000:0000:0000:0270:ebff:fe01:02033",
        "fe80-0000:0000:0000:0270:ebff:fe01:0203", "fe80:0000:0000:0000:0270:ebff:fe01: 203"}) {
    EXPECT_FALSE(parse_sysfs_gid(text)) << text;
  }
}

}  // namespace
}  // namespace rekindle::transport::verbs

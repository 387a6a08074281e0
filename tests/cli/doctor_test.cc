#include "tools/cli/doctor.h"

#include <filesystem>

#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/base/unique_fd.h"
#include "tests/recovery/rpc_certificates.h"
#include "tests/support/process.h"

namespace rekindle::cli::doctor {
namespace {

using ::testing::HasSubstr;

class Doctor : public ::testing::Test {
 protected:
  void file(const std::string& path, std::string_view text) {
    testing::write_file(dir_ / path, text);
  }
  testing::TempDir dir_;
  Kernel kernel_{dir_.path()};
};

TEST_F(Doctor, AnOldKernelFails) {
  file("proc/sys/kernel/osrelease", "4.19.0-generic\n");
  EXPECT_EQ(check_kernel(kernel_).level, Level::kFail);
  file("proc/sys/kernel/osrelease", "5.9.1\n");
  EXPECT_EQ(check_kernel(kernel_).level, Level::kFail);
  file("proc/sys/kernel/osrelease", "5.10.0\n");
  EXPECT_EQ(check_kernel(kernel_).level, Level::kOk);
  file("proc/sys/kernel/osrelease", "6.1.0-49-amd64\n");
  EXPECT_EQ(check_kernel(kernel_).level, Level::kOk);
}

TEST_F(Doctor, ALowMemlockLimitMattersOnlyWithoutTheCapability) {
  EXPECT_EQ(check_memlock(64 << 10, false).level, Level::kWarn);
  EXPECT_EQ(check_memlock(64 << 10, true).level, Level::kOk);
  EXPECT_EQ(check_memlock(RLIM_INFINITY, false).level, Level::kOk);
}

TEST_F(Doctor, FewDescriptorsWarn) {
  EXPECT_EQ(check_open_files(1024, 1 << 20).level, Level::kWarn);
  EXPECT_EQ(check_open_files(65536, 1 << 20).level, Level::kOk);
}

TEST_F(Doctor, AContainersLimitBelowTheHostsMemoryWarns) {
  file("proc/meminfo", "MemTotal:       24576 kB\nMemAvailable:   20000 kB\nSwapTotal:  0 kB\n");
  file("sys/fs/cgroup/memory.max", "max\n");
  EXPECT_EQ(check_memory(kernel_).level, Level::kOk);
  file("sys/fs/cgroup/memory.max", "1048576\n");
  EXPECT_EQ(check_memory(kernel_).level, Level::kWarn);
  EXPECT_THAT(check_memory(kernel_).found, HasSubstr("this container may use 1.00 MiB"));
}

TEST_F(Doctor, SwapWarns) {
  file("proc/meminfo", "MemTotal: 24576 kB\nMemAvailable: 20000 kB\nSwapTotal:  4096 kB\n");
  EXPECT_EQ(check_memory(kernel_).level, Level::kWarn);
}

TEST_F(Doctor, AStoresMountWithoutHugePagesWarns) {
  const std::filesystem::path store = "/dev/shm/rekindle-doctor-test";
  const std::string shm = "25 20 0:22 / /dev/shm rw,nosuid,nodev shared:3 - tmpfs tmpfs rw,inode64";
  file("proc/self/mountinfo", "20 1 8:1 / / rw - ext4 /dev/sda rw\n" + shm + "\n");
  EXPECT_EQ(check_huge_pages(kernel_, store).level, Level::kWarn);
  EXPECT_THAT(check_huge_pages(kernel_, store).advice,
              HasSubstr("`mount -o remount,huge=within_size /dev/shm`"));
  file("proc/self/mountinfo", shm + ",huge=within_size\n");
  EXPECT_EQ(check_huge_pages(kernel_, store).level, Level::kOk);
  // Its own mount covers the one below.
  file("proc/self/mountinfo",
       shm + "\n30 25 0:40 / " + store.string() + " rw - tmpfs rekindle rw,huge=within_size\n");
  EXPECT_EQ(check_huge_pages(kernel_, store).level, Level::kOk);
  EXPECT_EQ(check_huge_pages(kernel_, "/dev/shm/rekindle-doctor-tes").level, Level::kWarn);
  file("proc/self/mountinfo", "20 1 8:1 / / rw - ext4 /dev/sda rw\n");
  EXPECT_THAT(check_huge_pages(kernel_, store).found, HasSubstr("not on a tmpfs"));
}

TEST_F(Doctor, TheCongestionControlOfTcpIsNamed) {
  EXPECT_EQ(check_tcp(kernel_).level, Level::kOk);
  file("proc/sys/net/ipv4/tcp_congestion_control", "bbr\n");
  file("proc/sys/net/ipv4/tcp_available_congestion_control", "reno bbr\n");
  EXPECT_THAT(check_tcp(kernel_).found,
              HasSubstr("control bbr; --tcp-congestion may choose of: reno bbr"));
}

TEST_F(Doctor, AStoreOnDiskWarnsAndOneThatIsNotWritableFails) {
  EXPECT_EQ(check_store("/dev/shm/rekindle-doctor-test/not/there").level, Level::kOk);
  const Check proc = check_store("/proc/self");
  EXPECT_NE(proc.level, Level::kOk);
  EXPECT_FALSE(proc.advice.empty());
}

TEST_F(Doctor, LeasesAreTriedWhereTheStoreWillBe) {
  const Check shm = check_leases("/dev/shm/rekindle-doctor-test/not/there");
  EXPECT_EQ(shm.level, Level::kOk) << shm.found;
  const Check proc = check_leases("/proc/self/not/there");
  EXPECT_EQ(proc.level, Level::kWarn);
  EXPECT_THAT(proc.found, HasSubstr("/proc/self/not/there"));
  EXPECT_FALSE(proc.advice.empty());
}

TEST_F(Doctor, RdmaPortsAreListedWithTheirGids) {
  EXPECT_EQ(check_rdma(kernel_, true).level, Level::kOk);  // none
  const std::string port = "sys/class/infiniband/mlx5_0/ports/1/";
  file(port + "state", "4: ACTIVE\n");
  file(port + "rate", "400 Gb/sec (4X NDR)\n");
  file(port + "link_layer", "Ethernet\n");
  file(port + "gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001\n");
  file(port + "gids/1", "0000:0000:0000:0000:0000:0000:0000:0000\n");
  file(port + "gids/3", "0000:0000:0000:0000:0000:ffff:0a00:0003\n");
  file(port + "gid_attrs/types/3", "RoCE v2\n");
  const Check check = check_rdma(kernel_, true);
  EXPECT_EQ(check.level, Level::kOk);
  EXPECT_THAT(check.found, HasSubstr("mlx5_0 port 1 ACTIVE Ethernet 400 Gb/sec (4X NDR)"));
  EXPECT_THAT(check.found, HasSubstr("3 0000:0000:0000:0000:0000:ffff:0a00:0003 RoCE v2"));
  EXPECT_THAT(check.found, ::testing::Not(HasSubstr("1 0000:0000:0000:0000:0000:0000")));
  EXPECT_EQ(check_rdma(kernel_, false).level, Level::kWarn);
  file(port + "state", "1: DOWN\n");
  EXPECT_EQ(check_rdma(kernel_, true).level, Level::kWarn);
}

TEST_F(Doctor, OnlyLoopbackWarns) {
  file("sys/class/net/lo/operstate", "unknown\n");
  EXPECT_EQ(check_network(kernel_).level, Level::kWarn);
  file("sys/class/net/eth0/operstate", "up\n");
  file("sys/class/net/eth0/speed", "100000\n");
  file("sys/class/net/eth0/mtu", "9000\n");
  EXPECT_EQ(check_network(kernel_).level, Level::kOk);
  EXPECT_THAT(check_network(kernel_).found, HasSubstr("eth0 100 Gbit/s, mtu 9000"));
  file("sys/class/net/eth0/speed", "-1\n");
  EXPECT_THAT(check_network(kernel_).found, HasSubstr("eth0 speed unknown"));
}

TEST_F(Doctor, GpusAreNamed) {
  EXPECT_EQ(check_gpus(kernel_, false).level, Level::kOk);
  file("proc/driver/nvidia/gpus/0000:1b:00.0/information",
       "Model: \t\t NVIDIA H200\nIRQ:   \t\t 100\n");
  EXPECT_THAT(check_gpus(kernel_, true).found, HasSubstr("NVIDIA H200 at 0000:1b:00.0"));
  EXPECT_EQ(check_gpus(kernel_, false).level, Level::kWarn);
  file("proc/driver/nvidia/gpus/0000:1b:00.0/information", "");
  EXPECT_THAT(check_gpus(kernel_, true).found, HasSubstr("unknown model"));
}

TEST_F(Doctor, NumaBalancingWarnsOnSeveralNodes) {
  file("sys/devices/system/node/node0/cpulist", "0-31\n");
  file("proc/sys/kernel/numa_balancing", "1\n");
  EXPECT_EQ(check_numa(kernel_).level, Level::kOk);
  file("sys/devices/system/node/node1/cpulist", "32-63\n");
  EXPECT_EQ(check_numa(kernel_).level, Level::kWarn);
}

TEST_F(Doctor, NodesThatCopiesAreSpreadOverAreNamed) {
  file("sys/devices/system/node/node0/cpulist", "0-31\n");
  file("sys/devices/system/node/has_memory", "0\n");
  EXPECT_THAT(check_numa(kernel_).found, ::testing::Not(HasSubstr("interleaves")));
  file("sys/devices/system/node/node1/cpulist", "32-63\n");
  file("sys/devices/system/node/node2/cpulist", "\n");  // memory of a GPU
  file("sys/devices/system/node/has_memory", "0-2\n");
  EXPECT_THAT(check_numa(kernel_).found,
              HasSubstr("or interleaved over nodes 0-1 if these are on several"));
}

TEST_F(Doctor, APortInUseIsFound) {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t size = sizeof address;
  ASSERT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(fd.get(), 1), 0);
  ASSERT_EQ(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  EXPECT_EQ(check_port("the agent", ntohs(address.sin_port)).level, Level::kWarn);
}

TEST_F(Doctor, ASecretThatOthersCanReadFails) {
  EXPECT_EQ(check_identity({}).level, Level::kWarn);
  file("secret", "0123456789abcdef0123456789abcdef");
  rpc::CredentialOptions options;
  options.secret_file = (dir_ / "secret").string();
  std::filesystem::permissions(dir_ / "secret", std::filesystem::perms(0644));
  EXPECT_EQ(check_identity(options).level, Level::kFail);
  std::filesystem::permissions(dir_ / "secret", std::filesystem::perms(0600));
  EXPECT_EQ(check_identity(options).level, Level::kOk);
}

TEST_F(Doctor, ACertificateThatEndsSoonIsNamed) {
  const rpc::testing::TestDirectory directory;
  rpc::testing::TestAuthority authority(directory, "fleet");
  constexpr long kDay = 86400;
  const auto check = [&](long begins_s, long ends_s) {
    return check_identity(authority.issue("a", {.begins_s = begins_s, .ends_s = ends_s}));
  };
  EXPECT_EQ(check(-kDay, 100 * kDay).level, Level::kOk);
  EXPECT_EQ(check(-100 * kDay, 13 * kDay).level, Level::kWarn);
  EXPECT_EQ(check(-3600, 80000).level, Level::kOk) << "of a short life";
  EXPECT_EQ(check(-80000, 3600).level, Level::kWarn);
  EXPECT_EQ(check(-kDay, -60).level, Level::kFail);
  EXPECT_THAT(check(-kDay, 99 * kDay + kDay / 2).found, ::testing::HasSubstr(", for 99 more days"));
}

}  // namespace
}  // namespace rekindle::cli::doctor

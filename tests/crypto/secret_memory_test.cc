#include "src/crypto/secret_memory.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <openssl/crypto.h>

#include "src/crypto/signing_key.h"

namespace rekindle::crypto {
namespace {

static_assert(!fmt::is_formattable<Secret>::value, "nothing prints a secret");

// Whether core dumps leave out the mapping that has this address.
bool is_left_out(const void* at) {
  std::ifstream maps("/proc/self/smaps");
  bool found = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      const auto address = reinterpret_cast<std::uintptr_t>(at);
      found = begin <= address && address < end;
    } else if (found && line.starts_with("VmFlags:")) {
      return (line + " ").find(" dd ") != std::string::npos;
    }
  }
  ADD_FAILURE() << at << " is not mapped";
  return false;
}

TEST(SecretMemory, IsLeftOutOfCoreDumps) {
  for (const std::size_t bytes : {1u, 24u, 32u, 4096u, 32768u, 32769u, 65520u, 1000000u}) {
    void* const block = allocate_secret(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % 16, 0u) << bytes;
    EXPECT_TRUE(is_left_out(block)) << bytes;
    free_secret(block, bytes);
  }
  const Secret secret("a short one");
  EXPECT_TRUE(is_left_out(secret.reveal().data()));
  const std::vector<char> plain(64);
  EXPECT_FALSE(is_left_out(plain.data()));
}

TEST(SecretMemory, IsWipedWhenItIsFreed) {
  constexpr std::size_t kBytes = 96;
  const auto filled = [](char with) {
    auto* const block = static_cast<char*>(allocate_secret(kBytes));
    std::fill(block, block + kBytes, with);
    return block;
  };
  char* const first = filled('x');
  free_secret(first, kBytes);
  auto* const second = static_cast<char*>(allocate_secret(kBytes));
  EXPECT_EQ(second, first) << "the pool gives the same block again";
  EXPECT_EQ(std::count(second, second + kBytes, 'x'), 0);
  free_secret(second, kBytes);
}

TEST(SecretMemory, BlocksOfManyThreadsAndSizesDoNotOverlap) {
  const auto work = [](unsigned seed) {
    std::mt19937 random(seed);
    std::vector<std::pair<unsigned char*, std::size_t>> held;
    for (int i = 0; i < 3000; ++i) {
      if (held.size() < 40) {
        const std::size_t bytes = random() % (i % 50 == 0 ? 200'000u : 3'000u) + 1;
        auto* const block = static_cast<unsigned char*>(allocate_secret(bytes));
        std::fill(block, block + bytes, static_cast<unsigned char>(bytes));
        held.emplace_back(block, bytes);
      } else {
        const auto chosen = held.begin() + static_cast<std::ptrdiff_t>(random() % held.size());
        const auto [block, bytes] = *chosen;
        ASSERT_EQ(std::count(block, block + bytes, static_cast<unsigned char>(bytes)),
                  static_cast<std::ptrdiff_t>(bytes));
        held.erase(chosen);
        free_secret(block, bytes);
      }
    }
    for (const auto& [block, bytes] : held) free_secret(block, bytes);
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 4; ++seed) threads.emplace_back(work, seed);
  for (auto& thread : threads) thread.join();
}

TEST(SecretMemory, SecretsCompareByTheirBytes) {
  const Secret one("0123456789abcdef");
  const Secret copy = one;
  EXPECT_TRUE(one == copy);
  EXPECT_FALSE(one == Secret("0123456789abcdeg"));
  EXPECT_FALSE(one == Secret("0123456789abcde"));
  EXPECT_TRUE(Secret().empty());
  EXPECT_TRUE(Secret() == Secret());
}

// These tests run in a process of their own, because OpenSSL takes other memory only before its
// first use.
TEST(OpenSslMemoryDeathTest, IsLeftOutOfCoreDumps) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto use = [] {
    keep_openssl_secret();
    const auto require = [](bool right, const char* what) {
      if (right) return;
      std::fprintf(stderr, "wrong: %s\n", what);
      ::_exit(1);
    };
    void* block = OPENSSL_malloc(100);
    require(is_left_out(block), "a block is dumped");
    std::fill_n(static_cast<char*>(block), 100, 'x');
    block = OPENSSL_realloc(block, 50'000);
    require(is_left_out(block), "a larger block is dumped");
    require(std::count(static_cast<char*>(block), static_cast<char*>(block) + 100, 'x') == 100,
            "a larger block has lost its bytes");
    block = OPENSSL_realloc(block, 50);
    require(std::count(static_cast<char*>(block), static_cast<char*>(block) + 50, 'x') == 50,
            "a smaller block has lost its bytes");
    OPENSSL_free(block);
    OPENSSL_free(nullptr);
    const SigningKey key = SigningKey::generate();
    require(verify(key.public_key(), "text", key.sign("text")), "a signature");
    std::thread other([&key, &require] {
      require(verify(key.public_key(), "more", key.sign("more")), "a signature of a thread");
    });
    other.join();
    std::exit(0);
  };
  EXPECT_EXIT(use(), ::testing::ExitedWithCode(0), "");
}

TEST(OpenSslMemoryDeathTest, CannotBeChosenAfterTheFirstUse) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto choose_late = [] {
    (void)SigningKey::generate();
    try {
      keep_openssl_secret();
    } catch (const std::logic_error&) {
      std::exit(3);
    }
    std::exit(0);
  };
  EXPECT_EXIT(choose_late(), ::testing::ExitedWithCode(3), "");
}

#ifdef __has_feature
#if __has_feature(address_sanitizer)
TEST(SecretMemoryDeathTest, AddressSanitizerSeesItsEnd) {
  auto* const block = static_cast<volatile char*>(allocate_secret(100));
  block[99] = 'x';
  EXPECT_DEATH(block[100] = 'x', "use-after-poison");
  EXPECT_DEATH(block[115] = 'x', "use-after-poison");
  free_secret(const_cast<char*>(block), 100);
  EXPECT_DEATH(block[0] = 'x', "use-after-poison");
}
#endif
#endif

// One thread allocates without a pause, so it often holds the lock while the other one forks.
TEST(SecretMemory, AChildOfForkUsesIt) {
  std::atomic<bool> stop = false;
  std::thread busy([&stop] {
    while (!stop) free_secret(allocate_secret(100), 100);
  });
  int status = 0;
  for (int i = 0; i < 200 && status == 0; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      free_secret(allocate_secret(100), 100);
      ::_exit(0);
    }
    ::waitpid(child, &status, 0);
  }
  stop = true;
  busy.join();
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace rekindle::crypto

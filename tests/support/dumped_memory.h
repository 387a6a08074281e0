#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <openssl/bn.h>
#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/pem.h>

#include "src/base/unique_fd.h"
#include "tests/support/process.h"

namespace rekindle::testing {

// The memory of a process that a core dump may have: all readable mappings but those that the
// process has excluded (`dd`).
class DumpedMemory {
 public:
  explicit DumpedMemory(pid_t pid) {
    std::ifstream maps(fmt::format("/proc/{}/smaps", pid));
    const UniqueFd memory(::open(fmt::format("/proc/{}/mem", pid).c_str(), O_RDONLY | O_CLOEXEC));
    std::uint64_t begin = 0, end = 0;
    bool readable = false;
    for (std::string line; std::getline(maps, line);) {
      unsigned long from = 0, to = 0;
      char mode = 0;
      if (std::sscanf(line.c_str(), "%lx-%lx %c", &from, &to, &mode) == 3) {
        begin = from, end = to, readable = mode == 'r';
      } else if (line.starts_with("VmFlags:")) {
        if ((line + " ").find(" dd ") != std::string::npos) {
          excluded_bytes_ += end - begin;
        } else if (readable) {
          read(memory.get(), begin, end);
        }
      }
    }
  }

  bool has(std::string_view bytes) const {
    return std::ranges::any_of(
        parts_, [&](const std::string& part) { return part.find(bytes) != std::string::npos; });
  }
  std::uint64_t excluded_bytes() const { return excluded_bytes_; }

 private:
  // Some mappings of the kernel, such as [vvar], cannot be read.
  void read(int fd, std::uint64_t begin, std::uint64_t end) {
    std::string part(end - begin, '\0');
    std::size_t size = 0;
    while (size < part.size()) {
      const ssize_t got =
          ::pread(fd, part.data() + size, part.size() - size, static_cast<off_t>(begin + size));
      if (got <= 0) break;
      size += static_cast<std::size_t>(got);
    }
    part.resize(size);
    if (size > 0) parts_.push_back(std::move(part));
  }

  std::vector<std::string> parts_;
  std::uint64_t excluded_bytes_ = 0;
};

// A sequence of bytes and its name.
struct Hidden {
  std::string name;
  std::string bytes;
};

// A line of the file, and the number as OpenSSL keeps it and as files have it.
inline std::vector<Hidden> forms_of_key(const std::string& name, const std::string& file) {
  std::string pem = read_file(file);
  pem = pem.substr(pem.find("-----BEGIN PRIVATE KEY-----"));
  std::vector<Hidden> forms{{name + " in PEM", pem.substr(pem.find('\n') + 1, 48)}};
  BIO* const text = BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size()));
  EVP_PKEY* const key = PEM_read_bio_PrivateKey(text, nullptr, nullptr, nullptr);
  EXPECT_NE(key, nullptr) << file;
  std::string raw(32, '\0');
  auto* const bytes = reinterpret_cast<unsigned char*>(raw.data());
  if (std::size_t size = raw.size(); EVP_PKEY_get_raw_private_key(key, bytes, &size) != 1) {
    BIGNUM* number = nullptr;
    EXPECT_EQ(EVP_PKEY_get_bn_param(key, OSSL_PKEY_PARAM_PRIV_KEY, &number), 1);
    EXPECT_EQ(BN_bn2binpad(number, bytes, 32), 32);
    BN_clear_free(number);
  }
  EVP_PKEY_free(key);
  BIO_free(text);
  forms.push_back({name, raw});
  std::reverse(raw.begin(), raw.end());
  forms.push_back({name + " as a number", raw});
  return forms;
}

}  // namespace rekindle::testing

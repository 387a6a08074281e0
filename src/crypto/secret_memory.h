#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

// Memory that core dumps leave out. Any thread.
namespace rekindle::crypto {

// Aligned to 16 bytes. Throws std::bad_alloc. `bytes` is the same in both calls.
void* allocate_secret(std::size_t bytes);
// Wipes the block.
void free_secret(void* block, std::size_t bytes);

// From here on OpenSSL keeps everything in such memory: private keys, keys of sessions and the
// records of connections. Throws if OpenSSL is in use already.
void keep_openssl_secret();

template <typename T>
struct SecretAllocator {
  using value_type = T;
  SecretAllocator() = default;
  template <typename Other>
  SecretAllocator(const SecretAllocator<Other>&) {}
  T* allocate(std::size_t count) { return static_cast<T*>(allocate_secret(count * sizeof(T))); }
  void deallocate(T* block, std::size_t count) { free_secret(block, count * sizeof(T)); }
  bool operator==(const SecretAllocator&) const = default;
};
// A std::string would keep a short text in itself.
using SecretBytes = std::vector<char, SecretAllocator<char>>;

// A secret, a password or a key. Nothing prints it.
class Secret {
 public:
  Secret() = default;
  explicit Secret(std::string_view bytes) : bytes_(bytes.begin(), bytes.end()) {}

  bool empty() const { return bytes_.empty(); }
  // A copy of the text is not in secret memory.
  std::string_view reveal() const { return {bytes_.data(), bytes_.size()}; }
  // The time that it takes depends on the sizes only.
  bool operator==(const Secret& other) const;

 private:
  SecretBytes bytes_;
};

}  // namespace rekindle::crypto

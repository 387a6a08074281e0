#include "src/crypto/signing_key.h"

#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>

namespace rekindle::crypto {

namespace {

struct FreeKey {
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
struct FreeContext {
  void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
};
struct FreeBio {
  void operator()(BIO* bio) const { BIO_free(bio); }
};
using Key = std::unique_ptr<EVP_PKEY, FreeKey>;
using Context = std::unique_ptr<EVP_MD_CTX, FreeContext>;
using Bio = std::unique_ptr<BIO, FreeBio>;

const unsigned char* bytes_of(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

// OpenSSL fails in these calls only without memory.
template <typename T>
T must(T value, const char* what) {
  if (!value) throw std::runtime_error(std::string(what) + " failed");
  return value;
}

std::string raw_public_key(EVP_PKEY* key) {
  std::string raw(kPublicKeyBytes, '\0');
  std::size_t size = raw.size();
  must(EVP_PKEY_get_raw_public_key(key, reinterpret_cast<unsigned char*>(raw.data()), &size) == 1,
       "EVP_PKEY_get_raw_public_key");
  return raw;
}

Bio reader_of(std::string_view pem) {
  return must(Bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size()))), "BIO_new_mem_buf");
}

std::string text_of(BIO* bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  return {data, static_cast<std::size_t>(size)};
}

// Never asks on the terminal.
int no_passphrase(char*, int, int, void*) { return -1; }

}  // namespace

void SigningKey::Free::operator()(void* key) const { EVP_PKEY_free(static_cast<EVP_PKEY*>(key)); }

SigningKey::SigningKey(std::unique_ptr<void, Free> key)
    : key_(std::move(key)), public_key_(raw_public_key(static_cast<EVP_PKEY*>(key_.get()))) {}

SigningKey SigningKey::generate() {
  return SigningKey(std::unique_ptr<void, Free>(
      must(EVP_PKEY_Q_keygen(nullptr, nullptr, "ED25519"), "EVP_PKEY_Q_keygen")));
}

Result<SigningKey> SigningKey::from_pem(std::string_view pem) {
  Key key(PEM_read_bio_PrivateKey(reader_of(pem).get(), nullptr, no_passphrase, nullptr));
  if (!key) {
    return fail(ErrorCode::kInvalid,
                "this is not an unencrypted private key in PEM; make one by: "
                "openssl genpkey -algorithm ed25519");
  }
  if (EVP_PKEY_get_base_id(key.get()) != EVP_PKEY_ED25519) {
    return fail(ErrorCode::kInvalid,
                "the key is not of Ed25519; make one by: openssl genpkey -algorithm ed25519");
  }
  return SigningKey(std::unique_ptr<void, Free>(key.release()));
}

std::string SigningKey::to_pem() const {
  const Bio bio = must(Bio(BIO_new(BIO_s_secmem())), "BIO_new");
  must(PEM_write_bio_PrivateKey(bio.get(), static_cast<EVP_PKEY*>(key_.get()), nullptr, nullptr, 0,
                                nullptr, nullptr) == 1,
       "PEM_write_bio_PrivateKey");
  return text_of(bio.get());
}

std::string SigningKey::sign(std::string_view text) const {
  const Context context = must(Context(EVP_MD_CTX_new()), "EVP_MD_CTX_new");
  must(EVP_DigestSignInit(context.get(), nullptr, nullptr, nullptr,
                          static_cast<EVP_PKEY*>(key_.get())) == 1,
       "EVP_DigestSignInit");
  std::string signature(kSignatureBytes, '\0');
  std::size_t size = signature.size();
  must(EVP_DigestSign(context.get(), reinterpret_cast<unsigned char*>(signature.data()), &size,
                      bytes_of(text), text.size()) == 1,
       "EVP_DigestSign");
  return signature;
}

bool verify(std::string_view public_key, std::string_view text, std::string_view signature) {
  if (public_key.size() != kPublicKeyBytes || signature.size() != kSignatureBytes) return false;
  const Key key(EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, bytes_of(public_key),
                                            public_key.size()));
  if (!key) return false;
  const Context context = must(Context(EVP_MD_CTX_new()), "EVP_MD_CTX_new");
  return EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key.get()) == 1 &&
         EVP_DigestVerify(context.get(), bytes_of(signature), signature.size(), bytes_of(text),
                          text.size()) == 1;
}

Result<std::string> public_key_from_pem(const std::string& pem) {
  const Key key(PEM_read_bio_PUBKEY(reader_of(pem).get(), nullptr, no_passphrase, nullptr));
  if (!key || EVP_PKEY_get_base_id(key.get()) != EVP_PKEY_ED25519) {
    return fail(ErrorCode::kInvalid, "this is not a public key of Ed25519 in PEM");
  }
  return raw_public_key(key.get());
}

std::string public_key_to_pem(std::string_view public_key) {
  const Key key = must(Key(EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr,
                                                       bytes_of(public_key), public_key.size())),
                       "EVP_PKEY_new_raw_public_key");
  const Bio bio = must(Bio(BIO_new(BIO_s_mem())), "BIO_new");
  must(PEM_write_bio_PUBKEY(bio.get(), key.get()) == 1, "PEM_write_bio_PUBKEY");
  return text_of(bio.get());
}

std::string key_id(std::string_view public_key) {
  unsigned char digest[32];
  must(EVP_Q_digest(nullptr, "SHA256", nullptr, public_key.data(), public_key.size(), digest,
                    nullptr) == 1,
       "EVP_Q_digest");
  return fmt::format("{:02x}{:02x}{:02x}{:02x}", digest[0], digest[1], digest[2], digest[3]);
}

}  // namespace rekindle::crypto

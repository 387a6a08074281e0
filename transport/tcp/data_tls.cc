#include "transport/tcp/data_tls.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <openssl/err.h>
#include <openssl/ssl.h>

#include "src/crypto/hmac.h"

namespace rekindle::transport::tcp {
namespace {

// TLS_AES_128_GCM_SHA256: processors and kernels are fastest with it.
constexpr unsigned char kCipherId[] = {0x13, 0x01};
constexpr const char* kCipherName = "TLS_AES_128_GCM_SHA256";

using ContextPointer = std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)>;

std::string last_tls_error() {
  const unsigned long code = ERR_get_error();
  ERR_clear_error();
  if (code == 0) return "the peer closed the stream";
  const char* const reason = ERR_reason_error_string(code);
  return reason != nullptr ? reason : fmt::format("TLS error {:#x}", code);
}

// As if the token had been agreed on in an earlier connection.
SSL_SESSION* session_of(SSL* ssl, const SessionToken& token) {
  const crypto::Secret secret =
      crypto::derived_key({reinterpret_cast<const char*>(token.bytes.data()), token.bytes.size()},
                          "rekindle data stream tls v1");
  const std::string_view key = secret.reveal();
  const SSL_CIPHER* const cipher = SSL_CIPHER_find(ssl, kCipherId);
  SSL_SESSION* const session = SSL_SESSION_new();
  const bool made = session != nullptr && cipher != nullptr &&
                    SSL_SESSION_set1_master_key(
                        session, reinterpret_cast<const unsigned char*>(key.data()), key.size()) &&
                    SSL_SESSION_set_cipher(session, cipher) &&
                    SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION);
  if (made) return session;
  SSL_SESSION_free(session);
  return nullptr;
}

bool configure(SSL_CTX* context) {
  SSL_CTX_set_options(context, SSL_OP_ENABLE_KTLS);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                                SSL_MODE_RELEASE_BUFFERS);
  // Each connection proves the token anew: there is nothing to resume, and no ticket.
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  return SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) == 1 &&
         SSL_CTX_set_ciphersuites(context, kCipherName) == 1 &&
         SSL_CTX_set_num_tickets(context, 0) == 1;
}

}  // namespace

struct DataTls::Callbacks {
  static DataTls* of(SSL* ssl) { return static_cast<DataTls*>(SSL_get_app_data(ssl)); }

  static int use(SSL* ssl, const EVP_MD* digest, const unsigned char** id, std::size_t* id_bytes,
                 SSL_SESSION** session) {
    // OpenSSL copies neither, and uses them during the handshake only.
    static thread_local SessionHandle handle;
    *session = nullptr;
    if (digest != nullptr && EVP_MD_get_type(digest) != NID_sha256) return 1;
    const DataTls& self = *of(ssl);
    handle = handle_of(self.token_);
    *id = handle.bytes.data();
    *id_bytes = handle.bytes.size();
    *session = session_of(ssl, self.token_);
    return *session != nullptr ? 1 : 0;
  }

  // Without a session the handshake fails, as there is no certificate.
  static int find(SSL* ssl, const unsigned char* id, std::size_t id_bytes, SSL_SESSION** session) {
    *session = nullptr;
    DataTls& self = *of(ssl);
    SessionHandle handle;
    if (id_bytes != handle.bytes.size()) return 1;
    std::memcpy(handle.bytes.data(), id, id_bytes);
    const auto token = self.find_token_(handle);
    if (!token) return 1;
    self.token_ = *token;
    *session = session_of(ssl, *token);
    return *session != nullptr ? 1 : 0;
  }

  static SSL_CTX* context(bool accepts) {
    static const ContextPointer reader = make(false);
    static const ContextPointer source = make(true);
    return accepts ? source.get() : reader.get();
  }

  static ContextPointer make(bool accepts) {
    ContextPointer context(SSL_CTX_new(accepts ? TLS_server_method() : TLS_client_method()),
                           &SSL_CTX_free);
    if (!context || !configure(context.get())) return {nullptr, &SSL_CTX_free};
    if (accepts) {
      SSL_CTX_set_psk_find_session_callback(context.get(), find);
    } else {
      SSL_CTX_set_psk_use_session_callback(context.get(), use);
      // No certificate is good: a source without the token cannot take the place of another.
      SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
    }
    return context;
  }

  static Result<std::unique_ptr<DataTls>> begin(int fd, bool accepts) {
    ERR_clear_error();
    std::unique_ptr<DataTls> tls(new DataTls);
    SSL_CTX* const common = context(accepts);
    if (common != nullptr) tls->ssl_.reset(SSL_new(common));
    if (!tls->ssl_ || SSL_set_fd(tls->ssl_.get(), fd) != 1 ||
        SSL_set_app_data(tls->ssl_.get(), tls.get()) != 1) {
      return fail(ErrorCode::kInternal, "TLS of a data stream: {}", last_tls_error());
    }
    if (accepts) {
      SSL_set_accept_state(tls->ssl_.get());
    } else {
      SSL_set_connect_state(tls->ssl_.get());
    }
    return tls;
  }
};

void DataTls::Free::operator()(ssl_st* ssl) const { SSL_free(ssl); }

DataTls::~DataTls() = default;

Result<std::unique_ptr<DataTls>> DataTls::connect(int fd, const SessionToken& token) {
  TRY(auto tls, Callbacks::begin(fd, false));
  tls->token_ = token;
  return tls;
}

Result<std::unique_ptr<DataTls>> DataTls::accept(int fd, FindToken find_token) {
  TRY(auto tls, Callbacks::begin(fd, true));
  tls->find_token_ = std::move(find_token);
  return tls;
}

DataTls::Io DataTls::handshake() {
  ERR_clear_error();
  errno = 0;
  const int result = SSL_do_handshake(ssl_.get());
  if (result == 1) {
    if (SSL_session_reused(ssl_.get()) == 1) return Io::kDone;
    broken_reason_ = "the peer does not know the token of the session";
    return Io::kBroken;
  }
  switch (SSL_get_error(ssl_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      return Io::kWantsRead;
    case SSL_ERROR_WANT_WRITE:
      return Io::kWantsWrite;
    default:
      broken_reason_ = last_tls_error();
      return Io::kBroken;
  }
}

ssize_t DataTls::receive(std::span<std::byte> into) {
  ERR_clear_error();
  errno = 0;
  std::size_t moved = 0;
  const int result = SSL_read_ex(ssl_.get(), into.data(), into.size(), &moved);
  return result == 1 ? static_cast<ssize_t>(moved) : failed(result);
}

ssize_t DataTls::send(std::span<const std::byte> bytes) {
  ERR_clear_error();
  errno = 0;
  std::size_t moved = 0;
  const int result =
      SSL_write_ex(ssl_.get(), bytes.data(), std::min(bytes.size(), kRecordBytes), &moved);
  return result == 1 ? static_cast<ssize_t>(moved) : failed(result);
}

ssize_t DataTls::failed(int result) {
  const int error = errno;
  switch (SSL_get_error(ssl_.get(), result)) {
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE:
      errno = EAGAIN;
      return -1;
    case SSL_ERROR_ZERO_RETURN:
      return 0;
    case SSL_ERROR_SYSCALL:
      errno = error != 0 ? error : ECONNRESET;
      return -1;
    default:
      broken_reason_ = last_tls_error();
      errno = EPROTO;
      return -1;
  }
}

bool DataTls::kernel_sends() const { return BIO_get_ktls_send(SSL_get_wbio(ssl_.get())) > 0; }
bool DataTls::kernel_receives() const { return BIO_get_ktls_recv(SSL_get_rbio(ssl_.get())) > 0; }

}  // namespace rekindle::transport::tcp

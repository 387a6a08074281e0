#include "recovery/rpc/tls.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/ssl/context.hpp>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include "recovery/rpc/address.h"
#include "recovery/rpc/method_rules.h"
#include "src/base/settings_file.h"

namespace rekindle::rpc {

namespace {

// A caller that has a certificate, too. A server with a certificate ignores such a key.
constexpr std::string_view kOnlyKey = "rekindle ";
constexpr std::string_view kKeyOrCertificate = "rekindle-or-certificate ";
constexpr const char* kCiphers = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
constexpr std::array<unsigned char, 2> kAes128GcmSha256{0x13, 0x01};
// RFC 9266.
constexpr std::string_view kChannelLabel = "EXPORTER-Channel-Binding";
constexpr std::size_t kChannelBytes = 32;
constexpr std::string_view kSpiffe = "spiffe://";
// Our answers to changes of keys wait for the next frame.
constexpr std::size_t kMostAnswerBytes = 4096;
constexpr std::size_t kMaxListBytes = std::size_t{16} << 20;

struct FreeOpenSsl {
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(X509_CRL* list) const { X509_CRL_free(list); }
  void operator()(GENERAL_NAMES* names) const { GENERAL_NAMES_free(names); }
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509_STORE_CTX* check) const { X509_STORE_CTX_free(check); }
};

// `code`: of OpenSSL's error queue; 0: there is none.
std::string reason_of(unsigned long code) {
  const char* reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  return reason == nullptr ? "unknown reason" : reason;
}

std::string tls_problem() {
  const unsigned long code = ERR_peek_last_error();
  ERR_clear_error();
  return reason_of(code);
}

Failure bad_file(const char* option, const std::string& path, const char* what) {
  return fail(ErrorCode::kInvalid, "{} {}: {} ({})", option, path, what, tls_problem());
}

std::string text_of(const ASN1_STRING* string) {
  return {reinterpret_cast<const char*>(ASN1_STRING_get0_data(string)),
          static_cast<std::size_t>(ASN1_STRING_length(string))};
}

std::string time_text(const ASN1_TIME* time) {
  const std::unique_ptr<BIO, FreeOpenSsl> bio(BIO_new(BIO_s_mem()));
  if (bio == nullptr || ASN1_TIME_print(bio.get(), time) != 1) return "an unreadable time";
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &data);
  return {data, static_cast<std::size_t>(size)};
}

std::int64_t seconds_of(const ASN1_TIME* time) {
  tm parts{};
  return ASN1_TIME_to_tm(time, &parts) == 1 ? static_cast<std::int64_t>(::timegm(&parts)) : 0;
}

}  // namespace

std::vector<std::string> names_of(X509* certificate) {
  std::vector<std::string> uris;
  std::vector<std::string> hosts;
  const std::unique_ptr<GENERAL_NAMES, FreeOpenSsl> names(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; names != nullptr && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type != GEN_URI && name->type != GEN_DNS) continue;
    std::string text = text_of(name->d.ia5);
    if (std::ranges::any_of(text, [](char c) { return c <= ' ' || c >= 0x7f; })) continue;
    if (name->type == GEN_DNS) {
      hosts.push_back("dns:" + text);
    } else if (text.starts_with(kSpiffe)) {
      uris.push_back(std::move(text));
    }
  }
  uris.insert(uris.end(), hosts.begin(), hosts.end());
  return uris;
}

namespace {

// For messages.
std::string describe_certificate(X509* certificate) {
  if (certificate == nullptr) return "its certificate";
  const auto names = names_of(certificate);
  if (!names.empty()) return fmt::format("the certificate of {}", names.front());
  char subject[256] = {};
  X509_NAME_oneline(X509_get_subject_name(certificate), subject, sizeof subject - 1);
  return fmt::format("the certificate of {}", subject);
}

std::string describe_problem(X509_STORE_CTX* check) {
  X509* certificate = X509_STORE_CTX_get_current_cert(check);
  const std::string whose = describe_certificate(certificate);
  const int code = X509_STORE_CTX_get_error(check);
  switch (code) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return fmt::format("{} expired at {}; renew it", whose,
                         time_text(X509_get0_notAfter(certificate)));
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return fmt::format("{} is not valid before {}; check the clocks of both hosts", whose,
                         time_text(X509_get0_notBefore(certificate)));
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
      return fmt::format(
          "{} is of an unknown authority; give both ends --tls-ca with the one that "
          "issued it",
          whose);
    case X509_V_ERR_CERT_REVOKED:
      return fmt::format("{} is revoked", whose);
    case X509_V_ERR_CRL_HAS_EXPIRED:
    case X509_V_ERR_UNABLE_TO_GET_CRL:
      return fmt::format("--tls-crl has no current list of the authority of {}; renew the list",
                         whose);
    case X509_V_ERR_INVALID_PURPOSE:
      return fmt::format(
          "{} is not for this use; it needs the extended key usages clientAuth and "
          "serverAuth",
          whose);
    default:
      return fmt::format("{} is not valid: {}", whose, X509_verify_cert_error_string(code));
  }
}

Result<void> use_revocations(SSL_CTX* context, const std::string& path) {
  if (path.empty()) return {};
  X509_STORE* store = SSL_CTX_get_cert_store(context);
  auto text = read_trusted_file(path, kMaxListBytes);
  if (!text) return fail(std::move(text).error().with_context("--tls-crl"));
  const std::unique_ptr<BIO, FreeOpenSsl> file(
      BIO_new_mem_buf(text->data(), static_cast<int>(text->size())));
  if (file == nullptr) return bad_file("--tls-crl", path, "cannot be read");
  int lists = 0;
  for (;; ++lists) {
    const std::unique_ptr<X509_CRL, FreeOpenSsl> list(
        PEM_read_bio_X509_CRL(file.get(), nullptr, nullptr, nullptr));
    if (list == nullptr) break;
    if (X509_STORE_add_crl(store, list.get()) != 1) {
      return bad_file("--tls-crl", path, "cannot be used");
    }
  }
  // The end of the file is such an error, too.
  const bool ended = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  if (lists == 0 || !ended) {
    return bad_file("--tls-crl", path, "is not a list of revoked certificates in PEM");
  }
  ERR_clear_error();
  X509_STORE_set_flags(store, X509_V_FLAG_CRL_CHECK);
  return {};
}

Result<void> use_certificate(SSL_CTX* context, const CredentialOptions& options) {
  // One file may hold both, so neither is read with a buffer of the C library.
  auto chain = read_undumped(options.certificate_file);
  if (!chain) return fail(std::move(chain).error().with_context("--tls-cert"));
  auto key = read_private_key(options.key_file);
  if (!key) return fail(std::move(key).error().with_context("--tls-key"));
  SSL_CTX_set_default_passwd_cb(context, [](char*, int, int, void*) { return 0; });
  SSL_CTX_up_ref(context);
  boost::asio::ssl::context files(context);
  boost::system::error_code error;
  if (files.use_certificate_chain(boost::asio::buffer(*chain), error)) {
    return fail(ErrorCode::kInvalid, "--tls-cert {}: is not a certificate in PEM ({})",
                options.certificate_file, error.message());
  }
  if (files.use_private_key(boost::asio::buffer(*key), boost::asio::ssl::context::pem, error)) {
    return fail(ErrorCode::kInvalid,
                "--tls-key {}: is not the unencrypted key, in PEM, of --tls-cert ({})",
                options.key_file, error.message());
  }
  if (auto trusted = check_trusted_file(options.authority_file); !trusted) {
    return fail(std::move(trusted).error().with_context("--tls-ca"));
  }
  if (SSL_CTX_load_verify_file(context, options.authority_file.c_str()) != 1) {
    return bad_file("--tls-ca", options.authority_file, "has no certificates in PEM");
  }
  return use_revocations(context, options.revocation_file);
}

// Empty parts: the certificate names none.
CertifiedRole certified_name(const std::vector<std::string>& principals) {
  return certified_role(principals).value_or(CertifiedRole{});
}

bool names_host(X509* certificate, const std::string& host) {
  return X509_check_host(certificate, host.data(), host.size(), 0, nullptr) == 1 ||
         X509_check_ip_asc(certificate, host.c_str(), 0) == 1;
}

}  // namespace

// The callbacks of OpenSSL. They run inside a handshake.
struct TlsCallbacks {
  static int index() {
    static const int kIndex = SSL_get_ex_new_index(0, nullptr, nullptr, nullptr, nullptr);
    return kIndex;
  }
  static TlsSession* session(const SSL* ssl) {
    return static_cast<TlsSession*>(SSL_get_ex_data(ssl, index()));
  }

  static SSL_SESSION* to_session(SSL* ssl, std::string_view key) {
    SSL_SESSION* shared = SSL_SESSION_new();
    const SSL_CIPHER* cipher = SSL_CIPHER_find(ssl, kAes128GcmSha256.data());
    if (shared != nullptr && cipher != nullptr &&
        SSL_SESSION_set1_master_key(shared, reinterpret_cast<const unsigned char*>(key.data()),
                                    key.size()) == 1 &&
        SSL_SESSION_set_cipher(shared, cipher) == 1 &&
        SSL_SESSION_set_protocol_version(shared, TLS1_3_VERSION) == 1) {
      return shared;
    }
    SSL_SESSION_free(shared);
    return nullptr;
  }

  static int find_shared_key(SSL* ssl, const unsigned char* identity, std::size_t size,
                             SSL_SESSION** found) {
    *found = nullptr;
    TlsSession& self = *session(ssl);
    std::string_view id(reinterpret_cast<const char*>(identity), size);
    if (id.starts_with(kKeyOrCertificate)) {
      if (self.context_->has_certificate) return 1;
      id.remove_prefix(kKeyOrCertificate.size());
    } else if (id.starts_with(kOnlyKey)) {
      id.remove_prefix(kOnlyKey.size());
    } else {
      return 1;
    }
    for (const SharedKey& key : self.context_->shared_keys) {
      if (key.id != id) continue;
      self.key_id_ = key.id;
      *found = to_session(ssl, key.key.reveal());
      return *found != nullptr ? 1 : 0;
    }
    self.unknown_key_id_ = id.substr(0, 8);
    return 1;
  }

  static int use_shared_key(SSL* ssl, const EVP_MD* digest, const unsigned char** identity,
                            std::size_t* size, SSL_SESSION** used) {
    *used = nullptr;
    TlsSession& self = *session(ssl);
    if (self.context_->shared_keys.empty()) return 1;
    if (digest != nullptr && EVP_MD_get_type(digest) != NID_sha256) return 1;
    const SharedKey& key = self.context_->shared_keys.front();
    self.key_id_ = key.id;
    self.offered_identity_ = self.context_->has_certificate ? kKeyOrCertificate : kOnlyKey;
    self.offered_identity_ += key.id;
    *used = to_session(ssl, key.key.reveal());
    if (*used == nullptr) return 0;
    *identity = reinterpret_cast<const unsigned char*>(self.offered_identity_.data());
    *size = self.offered_identity_.size();
    return 1;
  }

  // A server goes on after a bad certificate, and refuses the peer with a reason after the
  // handshake: prove() looks at the result.
  static int check_certificate(X509_STORE_CTX* check, void*) {
    const auto* ssl = static_cast<const SSL*>(
        X509_STORE_CTX_get_ex_data(check, SSL_get_ex_data_X509_STORE_CTX_idx()));
    TlsSession& self = *session(ssl);
    if (X509_verify_cert(check) == 1) return 1;
    if (X509_STORE_CTX_get_error(check) == X509_V_OK) {
      X509_STORE_CTX_set_error(check, X509_V_ERR_UNSPECIFIED);
    }
    self.certificate_problem_ = describe_problem(check);
    return self.side_ == Side::kServer ? 1 : 0;
  }

  static void see_record(int sent, int, int type, const void* data, std::size_t size, SSL* ssl,
                         void*) {
    if (sent != 0 || type != SSL3_RT_HEADER) return;
    session(ssl)->last_header_.assign(static_cast<const char*>(data), size);
  }
};

// The BIO of a session: OpenSSL reads what the owner has brought, and writes what the owner takes.
struct TlsNetwork {
  static TlsSession* session(BIO* bio) { return static_cast<TlsSession*>(BIO_get_data(bio)); }

  static int read(BIO* bio, char* into, std::size_t size, std::size_t* moved) {
    std::string_view& input = session(bio)->input_;
    *moved = input.copy(into, size);
    input.remove_prefix(*moved);
    BIO_clear_retry_flags(bio);
    if (*moved == 0) BIO_set_retry_read(bio);
    return *moved > 0 ? 1 : 0;
  }

  static int write(BIO* bio, const char* bytes, std::size_t size, std::size_t* moved) {
    session(bio)->output_.append(bytes, size);
    *moved = size;
    return 1;
  }

  static long control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

  static BIO_METHOD* make_method() {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "rekindle network");
    if (made != nullptr && BIO_meth_set_read_ex(made, read) == 1 &&
        BIO_meth_set_write_ex(made, write) == 1 && BIO_meth_set_ctrl(made, control) == 1) {
      return made;
    }
    BIO_meth_free(made);
    return nullptr;
  }

  static BIO* make(TlsSession& session) {
    static BIO_METHOD* const kMethod = make_method();
    BIO* const bio = kMethod == nullptr ? nullptr : BIO_new(kMethod);
    if (bio == nullptr) return nullptr;
    BIO_set_data(bio, &session);
    BIO_set_init(bio, 1);
    return bio;
  }
};

namespace {

Result<std::unique_ptr<SSL_CTX, TlsContext::Free>> make_side(
    const CredentialOptions& options, const std::vector<crypto::Secret>& secrets, Side side) {
  std::unique_ptr<SSL_CTX, TlsContext::Free> context(SSL_CTX_new(TLS_method()));
  SSL_CTX* raw = context.get();
  if (raw == nullptr || SSL_CTX_set_min_proto_version(raw, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_ciphersuites(raw, kCiphers) != 1 || SSL_CTX_set_num_tickets(raw, 0) != 1) {
    return fail(ErrorCode::kInternal, "TLS 1.3 cannot be set up: {}", tls_problem());
  }
  // Each connection proves who is there: none resumes another.
  SSL_CTX_set_options(raw, SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_session_cache_mode(raw, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_mode(raw, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_max_send_fragment(raw, 4096);
  // OpenSSL takes a shared key for a resumed session, and servers want such a name for that.
  constexpr std::string_view kSessions = "rekindle";
  if (side == Side::kServer) {
    SSL_CTX_set_session_id_context(raw, reinterpret_cast<const unsigned char*>(kSessions.data()),
                                   kSessions.size());
  }
  SSL_CTX_set_verify(raw, SSL_VERIFY_PEER, nullptr);
  SSL_CTX_set_cert_verify_callback(raw, TlsCallbacks::check_certificate, nullptr);
  SSL_CTX_set_msg_callback(raw, TlsCallbacks::see_record);
  if (!secrets.empty() && side == Side::kServer) {
    SSL_CTX_set_psk_find_session_callback(raw, TlsCallbacks::find_shared_key);
  } else if (!secrets.empty()) {
    SSL_CTX_set_psk_use_session_callback(raw, TlsCallbacks::use_shared_key);
  }
  if (!options.certificate_file.empty()) TRY_VOID(use_certificate(raw, options));
  return context;
}

}  // namespace

void TlsContext::Free::operator()(ssl_ctx_st* context) const { SSL_CTX_free(context); }

Result<std::shared_ptr<const TlsContext>> make_tls_context(
    const CredentialOptions& options, const std::vector<crypto::Secret>& secrets) {
  ERR_clear_error();
  auto made = std::make_shared<TlsContext>();
  TRY(made->caller, make_side(options, secrets, Side::kCaller));
  TRY(made->server, make_side(options, secrets, Side::kServer));
  for (const crypto::Secret& secret : secrets) made->shared_keys.emplace_back(secret.reveal());
  if (X509* certificate = SSL_CTX_get0_certificate(made->caller.get())) {
    made->has_certificate = true;
    made->principals = names_of(certificate);
    made->not_before_s = seconds_of(X509_get0_notBefore(certificate));
    made->not_after_s = seconds_of(X509_get0_notAfter(certificate));
  }
  return std::shared_ptr<const TlsContext>(std::move(made));
}

TlsSession::TlsSession(std::shared_ptr<const TlsContext> context, Side side, std::string host)
    : context_(std::move(context)), side_(side), host_(std::move(host)) {}

TlsSession::~TlsSession() = default;

void TlsSession::Free::operator()(ssl_st* ssl) const { SSL_free(ssl); }

Result<std::unique_ptr<TlsSession>> TlsSession::create(std::shared_ptr<const TlsContext> context,
                                                       Side side, std::string host) {
  ERR_clear_error();
  std::unique_ptr<TlsSession> made(new TlsSession(std::move(context), side, std::move(host)));
  const TlsContext& shared = *made->context_;
  SSL* ssl = SSL_new(side == Side::kServer ? shared.server.get() : shared.caller.get());
  made->ssl_.reset(ssl);
  BIO* const network = TlsNetwork::make(*made);
  if (ssl == nullptr || network == nullptr ||
      SSL_set_ex_data(ssl, TlsCallbacks::index(), made.get()) != 1) {
    BIO_free(network);
    return fail(ErrorCode::kInternal, "TLS of a connection: {}", tls_problem());
  }
  SSL_set_bio(ssl, network, network);
  if (side == Side::kServer) {
    SSL_set_accept_state(ssl);
  } else {
    SSL_set_connect_state(ssl);
  }
  return made;
}

ssl_st* TlsSession::share() const {
  SSL_up_ref(ssl_.get());
  return ssl_.get();
}

void TlsSession::give_to_network(std::string& output) {
  output.clear();
  output.swap(output_);
}

bool TlsSession::has_bytes() const { return !input_.empty() || SSL_pending(ssl_.get()) > 0; }

Result<bool> TlsSession::shake_hands() {
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl_.get());
  if (result == 1) {
    // The headers of later records interest nobody.
    SSL_set_msg_callback(ssl_.get(), nullptr);
    return true;
  }
  if (SSL_get_error(ssl_.get(), result) == SSL_ERROR_WANT_READ) return false;
  return fail(failure(ERR_get_error()));
}

Result<std::size_t> TlsSession::read(std::span<char> into) {
  ERR_clear_error();
  std::size_t size = 0;
  const int result = SSL_read_ex(ssl_.get(), into.data(), into.size(), &size);
  if (result == 1) return size;
  // Answers to changes of keys, which nobody here asks for.
  if (output_.size() > kMostAnswerBytes) {
    return fail(ErrorCode::kPeerLost, "read: TLS: the peer changes its keys without an end");
  }
  switch (SSL_get_error(ssl_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      return 0u;
    case SSL_ERROR_ZERO_RETURN:
      return fail(ErrorCode::kPeerLost, "read: the peer closed the connection");
    default:
      return fail(ErrorCode::kPeerLost, "read: TLS: {}", tls_problem());
  }
}

Result<void> TlsSession::write(std::string_view bytes) {
  ERR_clear_error();
  while (!bytes.empty()) {
    std::size_t written = 0;
    if (SSL_write_ex(ssl_.get(), bytes.data(), bytes.size(), &written) != 1) {
      return fail(ErrorCode::kPeerLost, "write: TLS: {}", tls_problem());
    }
    bytes.remove_prefix(written);
  }
  return {};
}

std::string TlsSession::describe_keys() const {
  std::string text;
  for (const SharedKey& key : context_->shared_keys) {
    text += fmt::format("{}{}", text.empty() ? "secret " : " and ", key.id);
  }
  if (context_->has_certificate) text += text.empty() ? "a certificate" : " and a certificate";
  return text;
}

Error TlsSession::failure(unsigned long code) const {
  const std::string text = reason_of(code);
  if (side_ == Side::kCaller && !certificate_problem_.empty() && !context_->has_certificate) {
    return {
        ErrorCode::kDenied,
        fmt::format("both ends have different cluster secrets (this end {}), and the server "
                    "shows a certificate instead; give both the same --secret-file, or this end "
                    "--tls-cert, --tls-key and --tls-ca",
                    describe_keys())};
  }
  if (!certificate_problem_.empty()) return {ErrorCode::kDenied, certificate_problem_};
  const int reason = ERR_GET_REASON(code);
  if (side_ == Side::kServer) {
    if (!unknown_key_id_.empty()) {
      return {ErrorCode::kDenied,
              fmt::format("both ends have different cluster secrets (the caller {}, this end {}); "
                          "give both the same --secret-file",
                          unknown_key_id_, describe_keys())};
    }
    return {ErrorCode::kDenied,
            fmt::format("the TLS handshake failed ({}); this end has {}", text, describe_keys())};
  }
  if (reason == SSL_R_WRONG_VERSION_NUMBER) {
    return {
        ErrorCode::kDenied,
        "the server does not speak TLS: it has no secret and no certificate, or is of an older "
        "release; give it the same --secret-file, or certificates (and see --admit-protocol-2)"};
  }
  if (reason == SSL_R_SSLV3_ALERT_HANDSHAKE_FAILURE ||
      reason == SSL_R_TLSV1_ALERT_UNKNOWN_PSK_IDENTITY) {
    return {ErrorCode::kDenied,
            fmt::format("both ends have different cluster secrets, or only one has certificates "
                        "(this end has {}); give both the same --secret-file, or certificates",
                        describe_keys())};
  }
  return {ErrorCode::kDenied,
          fmt::format("the TLS handshake failed ({}); this end has {}", text, describe_keys())};
}

Result<void> TlsSession::prove(Peer& peer) const {
  SSL* const ssl = ssl_.get();
  peer.encrypted = true;
  if (SSL_session_reused(ssl) == 1) {
    peer.proof = Proof::kSecret;
    peer.principals = {"secret:" + key_id_};
    return {};
  }
  if (!certificate_problem_.empty()) return fail(ErrorCode::kDenied, "{}", certificate_problem_);
  X509* certificate = SSL_get0_peer_certificate(ssl);
  if (certificate == nullptr) {
    if (!unknown_key_id_.empty()) return fail(failure(0));
    return fail(ErrorCode::kDenied,
                "the caller has given no certificate; give it --tls-cert, --tls-key and --tls-ca{}",
                context_->shared_keys.empty() ? "" : ", or the --secret-file of this fleet");
  }
  if (SSL_get_verify_result(ssl) != X509_V_OK) {
    return fail(ErrorCode::kDenied, "{} is not valid: {}", describe_certificate(certificate),
                X509_verify_cert_error_string(SSL_get_verify_result(ssl)));
  }
  peer.proof = Proof::kCertificate;
  peer.principals = names_of(certificate);
  if (side_ == Side::kServer && peer.principals.empty()) {
    return fail(ErrorCode::kDenied,
                "{} has neither a SPIFFE URI nor a DNS name as subject alternative name; issue one "
                "that has",
                describe_certificate(certificate));
  }
  if (side_ == Side::kServer || names_host(certificate, host_)) return {};
  const std::string domain = trust_domain(peer.principals);
  const CertifiedRole name = certified_name(peer.principals);
  if (!domain.empty() && domain == trust_domain(context_->principals) &&
      (name.role == "coordinator" || name.role == "agent")) {
    return {};
  }
  return fail(ErrorCode::kDenied,
              "{} names neither the host {} nor a coordinator or agent of the trust domain of this "
              "end; issue it with this host as a subject alternative name",
              describe_certificate(certificate), host_);
}

Result<void> TlsSession::check_again(std::shared_ptr<const TlsContext> now) {
  if (SSL_session_reused(ssl_.get()) == 1) {
    if (std::ranges::find(now->shared_keys, key_id_, &SharedKey::id) != now->shared_keys.end()) {
      return {};
    }
    return fail(ErrorCode::kDenied, "the secret {} is no longer accepted", key_id_);
  }
  X509* certificate = SSL_get0_peer_certificate(ssl_.get());
  const bool ended =
      certificate != nullptr && X509_cmp_current_time(X509_get0_notAfter(certificate)) < 0;
  if (checked_by_ == now && !ended) return {};
  checked_by_ = std::move(now);
  const bool is_server = side_ == Side::kServer;
  X509_STORE* store =
      SSL_CTX_get_cert_store(is_server ? checked_by_->server.get() : checked_by_->caller.get());
  const std::unique_ptr<X509_STORE_CTX, FreeOpenSsl> check(X509_STORE_CTX_new());
  if (certificate == nullptr || check == nullptr ||
      X509_STORE_CTX_init(check.get(), store, certificate, SSL_get_peer_cert_chain(ssl_.get())) !=
          1 ||
      X509_STORE_CTX_set_default(check.get(), is_server ? "ssl_client" : "ssl_server") != 1) {
    return fail(ErrorCode::kDenied, "the certificate cannot be checked again: {}", tls_problem());
  }
  if (X509_verify_cert(check.get()) == 1) return {};
  return fail(ErrorCode::kDenied, "{}", describe_problem(check.get()));
}

std::string TlsSession::plain_bytes() const {
  if (last_header_.empty() || last_header_.front() != 0) return {};
  std::string bytes = last_header_;
  bytes.append(input_);
  return bytes;
}

Result<std::string> TlsSession::channel_binding() const {
  std::string bytes(kChannelBytes, '\0');
  if (SSL_export_keying_material(ssl_.get(), reinterpret_cast<unsigned char*>(bytes.data()),
                                 bytes.size(), kChannelLabel.data(), kChannelLabel.size(), nullptr,
                                 0, 0) == 1) {
    return bytes;
  }
  return fail(ErrorCode::kInternal, "TLS exports no keying material: {}", tls_problem());
}

std::string trust_domain(const std::vector<std::string>& principals) {
  if (principals.empty() || !principals.front().starts_with(kSpiffe)) return {};
  const std::string& uri = principals.front();
  const auto end = std::min(uri.find('/', kSpiffe.size()), uri.size());
  return uri.substr(kSpiffe.size(), end - kSpiffe.size());
}

std::string certified_node(const std::vector<std::string>& principals, std::string_view role) {
  const CertifiedRole name = certified_name(principals);
  return name.role == role ? name.name : std::string();
}

Result<void> check_certified_name(const Peer& peer, proto::Role wanted) {
  if (peer.proof != Proof::kCertificate) return {};
  const CertifiedRole name = certified_name(peer.principals);
  if (wanted != proto::ROLE_UNKNOWN && peer.role != wanted) {
    return fail(ErrorCode::kDenied, "{} answers, not {}", role_name(peer.role), role_name(wanted));
  }
  if (name.role.empty()) return {};
  // A command that pulls is the puller of its user.
  const bool is_user =
      peer.role == proto::ROLE_PULLER && name.role == role_name(proto::ROLE_CLIENT);
  if (role_name(peer.role) != name.role && !is_user) {
    return fail(ErrorCode::kDenied, "a {} has the certificate of {}, which is for the role {}",
                role_name(peer.role), peer.principals.front(), name.role);
  }
  if (peer.role == proto::ROLE_AGENT && (peer.node_id.empty() || !name.is_of(peer.node_id))) {
    return fail(ErrorCode::kDenied,
                "agent {} has the certificate of {}; give the agent --node-id {}, or a certificate "
                "of its own",
                peer.node_id, peer.principals.front(), name.name);
  }
  return {};
}

}  // namespace rekindle::rpc

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "proto/frame.pb.h"
#include "recovery/rpc/credentials.h"
#include "recovery/rpc/handshake.h"
#include "recovery/rpc/rpc.h"

struct ssl_st;

namespace rekindle::rpc {

// Reads the certificate files. kInvalid, kNotFound, kDenied: they cannot be used.
Result<std::shared_ptr<const TlsContext>> make_tls_context(const CredentialOptions& options,
                                                           const std::vector<std::string>& secrets);

// The first byte of a TLS connection. A plain one begins with 0, of the length of a frame.
inline constexpr char kTlsFirstByte = 22;

// The TLS of one connection: which keys it offers, and who the peer has proven to be. The OpenSSL
// callbacks write to it during the handshake, so it does not move.
class TlsSession {
 public:
  // `host`: the one that a caller has dialled.
  TlsSession(std::shared_ptr<const TlsContext> context, Side side, std::string host);
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  // A new SSL that refers to this session. The caller owns it.
  ssl_st* make_ssl();
  // Why the handshake failed. `code`: of OpenSSL's error queue.
  Error failure(unsigned long code, const std::string& text) const;
  // After the handshake. Fills proof, principals and encrypted. kDenied: the peer's certificate is
  // not valid, or does not name this host.
  Result<void> prove(ssl_st* ssl, Peer& peer) const;
  // A caller, after failure: what a peer has sent that does not speak TLS. "" otherwise.
  std::string plain_bytes(ssl_st* ssl) const;

 private:
  friend struct TlsCallbacks;
  std::string describe_keys() const;

  const std::shared_ptr<const TlsContext> context_;
  const Side side_;
  const std::string host_;
  // The identity that we offer; it holds until the handshake has ended.
  std::string offered_identity_;
  // The id of the shared key in use, or the one that the server does not have.
  std::string key_id_;
  std::string unknown_key_id_;
  // Why the peer's certificate is not valid.
  std::string certificate_problem_;
  // The header of the last record.
  std::string last_header_;
};

// Exported keying material, the same at both ends and known to no relay (RFC 9266).
Result<std::string> channel_binding(ssl_st* ssl);

// A certificate whose first SPIFFE URI is spiffe://DOMAIN/rekindle/ROLE[/NAME] says which role and
// node its owner is. kDenied: the hello says another. `wanted`: the role that the caller expects.
Result<void> check_certified_name(const Peer& peer, proto::Role wanted);

// Of the first SPIFFE URI of `principals`; "": none.
std::string trust_domain(const std::vector<std::string>& principals);
// NAME of spiffe://DOMAIN/rekindle/ROLE/NAME with this role; "": none.
std::string certified_node(const std::vector<std::string>& principals, std::string_view role);

}  // namespace rekindle::rpc

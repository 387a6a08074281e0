#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "proto/frame.pb.h"
#include "recovery/rpc/credentials.h"
#include "recovery/rpc/handshake.h"
#include "recovery/rpc/rpc.h"

struct ssl_st;
struct x509_st;

namespace rekindle::rpc {

// Reads the certificate files. kInvalid, kNotFound, kDenied: they cannot be used.
Result<std::shared_ptr<const TlsContext>> make_tls_context(
    const CredentialOptions& options, const std::vector<crypto::Secret>& secrets);

// The first byte of a TLS connection. A plain one begins with 0, of the length of a frame.
inline constexpr char kTlsFirstByte = 22;

// The TLS of one connection, without a socket: its owner brings what the network has sent, and
// sends what is handed out. The OpenSSL callbacks write to it during the handshake, so it does not
// move.
class TlsSession {
 public:
  // `host`: the one that a caller has dialled. kInternal: OpenSSL has no memory for it.
  static Result<std::unique_ptr<TlsSession>> create(std::shared_ptr<const TlsContext> context,
                                                    Side side, std::string host);
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;
  ~TlsSession();

  // `bytes` stay where they are until read() or shake_hands() asks for more.
  void take_from_network(std::string_view bytes) { input_ = bytes; }
  // Replaces `output` by what has to be sent. Also a failed handshake has something to say.
  void give_to_network(std::string& output);

  // Another reference, which the caller owns, for a stream that moves the bytes itself. Then only
  // prove() and check_again() of this object are of use.
  ssl_st* share() const;

  // false: the peer has to send more. kDenied: the ends do not accept each other.
  Result<bool> shake_hands();
  // After the handshake. Fills proof, principals and encrypted. kDenied: the peer's certificate is
  // not valid, or does not name this host.
  Result<void> prove(Peer& peer) const;
  // The same proof, by the credentials of now: certificates end or are revoked, secrets are
  // replaced. kDenied: it is none any more.
  Result<void> check_again(std::shared_ptr<const TlsContext> now);
  // After the handshake: exported keying material, the same at both ends and known to no relay
  // (RFC 9266).
  Result<std::string> channel_binding() const;
  // A caller, after shake_hands() has failed: what a peer has sent that does not speak TLS. ""
  // otherwise.
  std::string plain_bytes() const;

  // After the handshake: bytes that the peer has written. 0: it has to send more. kPeerLost: its
  // bytes are not of this connection, or it has ended TLS.
  Result<std::size_t> read(std::span<char> into);
  // false: read() would ask for more.
  bool has_bytes() const;
  Result<void> write(std::string_view bytes);

 private:
  friend struct TlsCallbacks;
  friend struct TlsNetwork;
  struct Free {
    void operator()(ssl_st* ssl) const;
  };
  TlsSession(std::shared_ptr<const TlsContext> context, Side side, std::string host);
  // Why the handshake failed. `code`: of OpenSSL's error queue.
  Error failure(unsigned long code) const;
  std::string describe_keys() const;

  const std::shared_ptr<const TlsContext> context_;
  // The one by which the peer's certificate was verified last.
  std::shared_ptr<const TlsContext> checked_by_ = context_;
  const Side side_;
  const std::string host_;
  std::unique_ptr<ssl_st, Free> ssl_;
  // Of the network, and for it.
  std::string_view input_;
  std::string output_;
  // The identity that we offer; it holds until the handshake has ended.
  std::string offered_identity_;
  // The id of the shared key in use, or the one that the server does not have.
  std::string key_id_;
  std::string unknown_key_id_;
  // Why the peer's certificate is not valid.
  std::string certificate_problem_;
  // The header of the last record of the handshake.
  std::string last_header_;
};

// Its SPIFFE URIs first, then "dns:" and each host name. A name with control characters is none.
std::vector<std::string> names_of(x509_st* certificate);

// A certificate whose first SPIFFE URI is spiffe://DOMAIN/rekindle/ROLE[/NAME] says which role and
// node its owner is. kDenied: the hello says another. `wanted`: the role that the caller expects.
Result<void> check_certified_name(const Peer& peer, proto::Role wanted);

// Of the first SPIFFE URI of `principals`; "": none.
std::string trust_domain(const std::vector<std::string>& principals);
// NAME of spiffe://DOMAIN/rekindle/ROLE/NAME with this role; "": none.
std::string certified_node(const std::vector<std::string>& principals, std::string_view role);

}  // namespace rekindle::rpc

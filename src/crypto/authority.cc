#include "src/crypto/authority.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <openssl/bio.h>
#include <openssl/bn.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

namespace rekindle::crypto {

namespace {

template <auto kFree>
struct OpensslFree {
  template <typename T>
  void operator()(T* object) const {
    kFree(object);
  }
};
using X509Key = std::unique_ptr<EVP_PKEY, OpensslFree<&EVP_PKEY_free>>;
using X509Bio = std::unique_ptr<BIO, OpensslFree<&BIO_free>>;
using Certificate = std::unique_ptr<X509, OpensslFree<&X509_free>>;
using RevocationList = std::unique_ptr<X509_CRL, OpensslFree<&X509_CRL_free>>;
using Extension = std::unique_ptr<X509_EXTENSION, OpensslFree<&X509_EXTENSION_free>>;
using BigNumber = std::unique_ptr<BIGNUM, OpensslFree<&BN_free>>;
using Time = std::unique_ptr<ASN1_TIME, OpensslFree<&ASN1_TIME_free>>;
using SerialNumber = std::unique_ptr<ASN1_INTEGER, OpensslFree<&ASN1_INTEGER_free>>;
using Names = std::unique_ptr<GENERAL_NAMES, OpensslFree<&GENERAL_NAMES_free>>;

// 159 bits are 20 bytes without a sign, the most that a certificate may have.
constexpr int kSerialBits = 159;
// Of X.520. Longer names stand in the URI only.
constexpr std::size_t kLongestSubject = 64;
constexpr std::chrono::minutes kClockSkew{5};

// These calls fail only without memory.
template <typename T>
T need(T value, const char* what) {
  if (!value) throw std::runtime_error(std::string(what) + " failed");
  return value;
}
void need_one(int value, const char* what) { need(value == 1, what); }

// `BIO_s_secmem` wipes what it held.
X509Bio new_bio() { return need(X509Bio(BIO_new(BIO_s_secmem())), "BIO_new"); }

X509Bio bio_over(const std::string& pem) {
  return need(X509Bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size()))),
              "BIO_new_mem_buf");
}

std::string text_in(BIO* bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  return {data, static_cast<std::size_t>(size)};
}

int refuse_passphrase(char*, int, int, void*) { return -1; }

Certificate first_certificate(const std::string& pem) {
  Certificate found(PEM_read_bio_X509(bio_over(pem).get(), nullptr, refuse_passphrase, nullptr));
  ERR_clear_error();
  return found;
}

std::string pem_of(X509* certificate) {
  const X509Bio bio = new_bio();
  need_one(PEM_write_bio_X509(bio.get(), certificate), "PEM_write_bio_X509");
  return text_in(bio.get());
}

std::string pem_of(EVP_PKEY* key) {
  const X509Bio bio = new_bio();
  need_one(PEM_write_bio_PrivateKey(bio.get(), key, nullptr, nullptr, 0, nullptr, nullptr),
           "PEM_write_bio_PrivateKey");
  return text_in(bio.get());
}

X509Key new_key() { return need(X509Key(EVP_EC_gen("P-256")), "EVP_EC_gen"); }

std::string serial_of(const ASN1_INTEGER* serial) {
  const BigNumber number(need(ASN1_INTEGER_to_BN(serial, nullptr), "ASN1_INTEGER_to_BN"));
  char* digits = need(BN_bn2hex(number.get()), "BN_bn2hex");
  std::string text(digits);
  OPENSSL_free(digits);
  return text;
}

SerialNumber serial_from(const std::string& digits) {
  BIGNUM* number = nullptr;
  if (BN_hex2bn(&number, digits.c_str()) != static_cast<int>(digits.size())) number = nullptr;
  const BigNumber owned(number);
  return owned ? SerialNumber(BN_to_ASN1_INTEGER(owned.get(), nullptr)) : nullptr;
}

CertificateTime time_of(const ASN1_TIME* time) {
  std::tm parts{};
  need_one(ASN1_TIME_to_tm(time, &parts), "ASN1_TIME_to_tm");
  return CertificateTime(std::chrono::seconds(::timegm(&parts)));
}

Time asn1_time(CertificateTime time) {
  return need(Time(ASN1_TIME_set(nullptr, time.time_since_epoch().count())), "ASN1_TIME_set");
}

std::string name_of(const X509_NAME* name) {
  const X509Bio bio = new_bio();
  X509_NAME_print_ex(bio.get(), name, 0, XN_FLAG_RFC2253);
  return text_in(bio.get());
}

std::string asn1_text(const ASN1_STRING* text) {
  return {reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
          static_cast<std::size_t>(ASN1_STRING_length(text))};
}

std::string address_text(const ASN1_OCTET_STRING* address) {
  const unsigned char* b = ASN1_STRING_get0_data(address);
  const int size = ASN1_STRING_length(address);
  if (size == 4) return fmt::format("{}.{}.{}.{}", b[0], b[1], b[2], b[3]);
  std::string text;
  for (int i = 0; i + 1 < size; i += 2) {
    text += fmt::format("{}{:x}", i == 0 ? "" : ":", b[i] << 8 | b[i + 1]);
  }
  return text;
}

CertificateFacts facts_of(const X509* certificate) {
  CertificateFacts facts;
  facts.serial = serial_of(X509_get0_serialNumber(certificate));
  facts.issuer = name_of(X509_get_issuer_name(certificate));
  facts.begins = time_of(X509_get0_notBefore(certificate));
  facts.ends = time_of(X509_get0_notAfter(certificate));
  const Names names(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; names && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type == GEN_URI) facts.uris.push_back(asn1_text(name->d.ia5));
    if (name->type == GEN_DNS) facts.dns_names.push_back(asn1_text(name->d.ia5));
    if (name->type == GEN_IPADD) facts.addresses.push_back(address_text(name->d.ip));
  }
  return facts;
}

// A certificate with all that both kinds have. `attribute`: of its subject, which has one.
Certificate new_certificate(EVP_PKEY* key, const char* attribute, std::string_view subject,
                            CertificateTime begins, CertificateTime ends) {
  Certificate made = need(Certificate(X509_new()), "X509_new");
  need_one(X509_set_version(made.get(), X509_VERSION_3), "X509_set_version");
  const BigNumber serial(need(BN_new(), "BN_new"));
  need_one(BN_rand(serial.get(), kSerialBits, BN_RAND_TOP_ONE, BN_RAND_BOTTOM_ANY), "BN_rand");
  need(BN_to_ASN1_INTEGER(serial.get(), X509_get_serialNumber(made.get())), "BN_to_ASN1_INTEGER");
  need_one(X509_set1_notBefore(made.get(), asn1_time(begins).get()), "X509_set1_notBefore");
  need_one(X509_set1_notAfter(made.get(), asn1_time(ends).get()), "X509_set1_notAfter");
  const std::string cut(subject.substr(0, kLongestSubject));
  need_one(X509_NAME_add_entry_by_txt(X509_get_subject_name(made.get()), attribute, MBSTRING_UTF8,
                                      reinterpret_cast<const unsigned char*>(cut.data()),
                                      static_cast<int>(cut.size()), -1, 0),
           "X509_NAME_add_entry_by_txt");
  need_one(X509_set_pubkey(made.get(), key), "X509_set_pubkey");
  return made;
}

// `value` in the notation of x509v3_config(5).
void add_extension(X509* to, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, to, nullptr, nullptr, 0);
  const Extension made(X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str()));
  need(made != nullptr, "X509V3_EXT_conf_nid");
  need_one(X509_add_ext(to, made.get(), -1), "X509_add_ext");
}

void add_name(GENERAL_NAMES* to, GENERAL_NAME* name) {
  need(name, "a2i_GENERAL_NAME");
  need(sk_GENERAL_NAME_push(to, name) > 0, "sk_GENERAL_NAME_push");
}

// Built without the notation of configuration files, in which a comma would begin another name.
Result<Names> alternative_names(const CertificateNames& from) {
  Names names(need(sk_GENERAL_NAME_new_null(), "sk_GENERAL_NAME_new_null"));
  const auto add = [&](int type, const char* text) {
    GENERAL_NAME* name = a2i_GENERAL_NAME(nullptr, nullptr, nullptr, type, text, 0);
    if (name != nullptr) add_name(names.get(), name);
    ERR_clear_error();
    return name != nullptr;
  };
  need(add(GEN_URI, from.uri.c_str()), "a2i_GENERAL_NAME");
  for (const std::string& dns : from.dns_names) {
    const bool plain = std::ranges::all_of(dns, [](char c) {
      return ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z') || ('0' <= c && c <= '9') ||
             c == '-' || c == '.' || c == '*' || c == '_';
    });
    if (dns.empty() || !plain || !add(GEN_DNS, dns.c_str())) {
      return fail(ErrorCode::kInvalid, "'{}' is not a DNS name", dns);
    }
  }
  for (const std::string& address : from.addresses) {
    if (!add(GEN_IPADD, address.c_str())) {
      return fail(ErrorCode::kInvalid, "'{}' is not an IP address", address);
    }
  }
  return names;
}

// Reads the lists one after the other. kInvalid: other text stands between them.
Result<std::vector<RevocationList>> read_lists(const std::string& pem) {
  std::vector<RevocationList> lists;
  const X509Bio bio = bio_over(pem);
  for (;;) {
    RevocationList list(PEM_read_bio_X509_CRL(bio.get(), nullptr, nullptr, nullptr));
    if (!list) break;
    lists.push_back(std::move(list));
  }
  const bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  if (!at_end || (lists.empty() && pem.find_first_not_of(" \t\r\n") != std::string::npos)) {
    return fail(ErrorCode::kInvalid, "this is not a list of revoked certificates in PEM");
  }
  return lists;
}

void add_serials_of(X509_CRL* list, std::vector<std::string>& serials) {
  const STACK_OF(X509_REVOKED)* entries = X509_CRL_get_REVOKED(list);
  for (int i = 0; i < sk_X509_REVOKED_num(entries); ++i) {
    serials.push_back(serial_of(X509_REVOKED_get0_serialNumber(sk_X509_REVOKED_value(entries, i))));
  }
}

}  // namespace

struct Authority::Parts {
  X509Key key;
  Certificate certificate;
};

Result<CertificateFacts> read_certificate(const std::string& pem) {
  const Certificate found = first_certificate(pem);
  if (!found) return fail(ErrorCode::kInvalid, "there is no certificate in PEM");
  return facts_of(found.get());
}

Authority Authority::create(const std::string& trust_domain, CertificateTime now,
                            std::chrono::days life) {
  auto parts = std::make_shared<Parts>();
  parts->key = new_key();
  // Chains are found by the name of the issuer, so the authorities of a rotation need two.
  const BigNumber tag(need(BN_new(), "BN_new"));
  need_one(BN_rand(tag.get(), 32, BN_RAND_TOP_ONE, BN_RAND_BOTTOM_ANY), "BN_rand");
  parts->certificate = new_certificate(
      parts->key.get(), "CN",
      fmt::format("rekindle CA {:08x} of {:.40}", BN_get_word(tag.get()), trust_domain),
      now - kClockSkew, now + life);
  X509* const own = parts->certificate.get();
  need_one(X509_set_issuer_name(own, X509_get_subject_name(own)), "X509_set_issuer_name");
  add_extension(own, own, NID_basic_constraints, "critical,CA:TRUE,pathlen:0");
  add_extension(own, own, NID_key_usage, "critical,keyCertSign,cRLSign");
  add_extension(own, own, NID_subject_key_identifier, "hash");
  add_extension(own, own, NID_name_constraints, "critical,permitted;URI:" + trust_domain);
  add_extension(own, own, NID_subject_alt_name, "URI:spiffe://" + trust_domain);
  need(X509_sign(own, parts->key.get(), EVP_sha256()) > 0, "X509_sign");
  return Authority(std::move(parts));
}

Result<Authority> Authority::from_pem(const std::string& pem) {
  auto parts = std::make_shared<Parts>();
  parts->key.reset(
      PEM_read_bio_PrivateKey(bio_over(pem).get(), nullptr, refuse_passphrase, nullptr));
  parts->certificate = first_certificate(pem);
  ERR_clear_error();
  if (!parts->key || !parts->certificate) {
    return fail(ErrorCode::kInvalid,
                "it needs an unencrypted private key and a certificate in PEM");
  }
  const bool fits = X509_check_private_key(parts->certificate.get(), parts->key.get()) == 1;
  ERR_clear_error();
  if (!fits) return fail(ErrorCode::kInvalid, "the key is not that of the certificate");
  return Authority(std::move(parts));
}

std::string Authority::to_pem() const { return pem_of(parts_->key.get()) + certificate_pem(); }

std::string Authority::certificate_pem() const { return pem_of(parts_->certificate.get()); }

CertificateFacts Authority::facts() const { return facts_of(parts_->certificate.get()); }

std::string Authority::trust_domain() const {
  constexpr std::string_view kScheme = "spiffe://";
  for (const std::string& uri : facts().uris) {
    if (uri.starts_with(kScheme)) return uri.substr(kScheme.size());
  }
  return "";
}

Result<std::string> Authority::issue(const CertificateNames& names, CertificateTime now,
                                     std::chrono::seconds life) const {
  TRY(const Names alternatives, alternative_names(names));
  const CertificateTime last = facts().ends;
  if (now + life > last) {
    return fail(ErrorCode::kInvalid,
                "the certificate would outlive its authority, which ends in {} days; choose less, "
                "or make a new authority",
                std::chrono::floor<std::chrono::days>(last - now).count());
  }
  const X509Key key = new_key();
  // With users, the gateway of etcd refuses certificates that have a common name.
  const Certificate made =
      new_certificate(key.get(), "O", names.common_name, now - kClockSkew, now + life);
  X509* const issuer = parts_->certificate.get();
  need_one(X509_set_issuer_name(made.get(), X509_get_subject_name(issuer)), "X509_set_issuer_name");
  need_one(X509_add1_ext_i2d(made.get(), NID_subject_alt_name, alternatives.get(), 0, 0),
           "X509_add1_ext_i2d");
  add_extension(made.get(), issuer, NID_basic_constraints, "critical,CA:FALSE");
  add_extension(made.get(), issuer, NID_key_usage, "critical,digitalSignature");
  add_extension(made.get(), issuer, NID_ext_key_usage, "clientAuth,serverAuth");
  add_extension(made.get(), issuer, NID_subject_key_identifier, "hash");
  add_extension(made.get(), issuer, NID_authority_key_identifier, "keyid:always");
  need(X509_sign(made.get(), parts_->key.get(), EVP_sha256()) > 0, "X509_sign");
  return pem_of(key.get()) + pem_of(made.get());
}

bool Authority::issued(const std::string& certificate_pem) const {
  const Certificate certificate = first_certificate(certificate_pem);
  const bool own = certificate && X509_verify(certificate.get(), parts_->key.get()) == 1;
  ERR_clear_error();
  return own;
}

Result<std::string> Authority::revoke(const std::string& former,
                                      const std::vector<std::string>& serials,
                                      CertificateTime now) const {
  X509* const issuer = parts_->certificate.get();
  std::vector<std::string> all = serials;
  TRY(const auto lists, read_lists(former));
  for (const RevocationList& list : lists) {
    if (X509_NAME_cmp(X509_CRL_get_issuer(list.get()), X509_get_subject_name(issuer)) == 0) {
      add_serials_of(list.get(), all);
    }
  }
  std::ranges::sort(all);
  all.erase(std::unique(all.begin(), all.end()), all.end());

  const RevocationList made = need(RevocationList(X509_CRL_new()), "X509_CRL_new");
  need_one(X509_CRL_set_version(made.get(), X509_CRL_VERSION_2), "X509_CRL_set_version");
  need_one(X509_CRL_set_issuer_name(made.get(), X509_get_subject_name(issuer)),
           "X509_CRL_set_issuer_name");
  const Time today = asn1_time(now - kClockSkew);
  need_one(X509_CRL_set1_lastUpdate(made.get(), today.get()), "X509_CRL_set1_lastUpdate");
  need_one(X509_CRL_set1_nextUpdate(made.get(), X509_get0_notAfter(issuer)),
           "X509_CRL_set1_nextUpdate");
  for (const std::string& serial : all) {
    const SerialNumber number = serial_from(serial);
    if (!number) return fail(ErrorCode::kInvalid, "'{}' is not a serial number", serial);
    X509_REVOKED* entry = need(X509_REVOKED_new(), "X509_REVOKED_new");
    need_one(X509_REVOKED_set_serialNumber(entry, number.get()), "X509_REVOKED_set_serialNumber");
    need_one(X509_REVOKED_set_revocationDate(entry, today.get()),
             "X509_REVOKED_set_revocationDate");
    need_one(X509_CRL_add0_revoked(made.get(), entry), "X509_CRL_add0_revoked");
  }
  const SerialNumber number = need(SerialNumber(ASN1_INTEGER_new()), "ASN1_INTEGER_new");
  need_one(ASN1_INTEGER_set_int64(number.get(), now.time_since_epoch().count()),
           "ASN1_INTEGER_set_int64");
  need_one(X509_CRL_add1_ext_i2d(made.get(), NID_crl_number, number.get(), 0, 0),
           "X509_CRL_add1_ext_i2d");
  need(X509_CRL_sign(made.get(), parts_->key.get(), EVP_sha256()) > 0, "X509_CRL_sign");
  const X509Bio bio = new_bio();
  need_one(PEM_write_bio_X509_CRL(bio.get(), made.get()), "PEM_write_bio_X509_CRL");
  return text_in(bio.get());
}

Result<std::vector<std::string>> revoked_serials(const std::string& pem) {
  TRY(const auto lists, read_lists(pem));
  std::vector<std::string> serials;
  for (const RevocationList& list : lists) add_serials_of(list.get(), serials);
  return serials;
}

}  // namespace rekindle::crypto

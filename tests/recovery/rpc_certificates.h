#pragma once

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <unistd.h>

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include "recovery/rpc/credentials.h"

namespace rekindle::rpc::testing {

// A directory that its owner removes.
class TestDirectory {
 public:
  TestDirectory() {
    char name[] = "/tmp/rekindle-tls-XXXXXX";
    if (::mkdtemp(name) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = name;
  }
  ~TestDirectory() { std::filesystem::remove_all(path_); }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  // Mode 0600. Replaces the file at once, as an operator should.
  std::string write(const std::string& name, const std::string& text) const {
    const std::string path = file(name);
    std::ofstream(path + ".new") << text;
    std::filesystem::permissions(path + ".new", std::filesystem::perms(0600));
    std::filesystem::rename(path + ".new", path);
    return path;
  }

 private:
  std::string path_;
};

// What a test wants of a certificate.
struct Wanted {
  // "URI:spiffe://…", "DNS:…", "IP:…", separated by commas.
  std::string names = "DNS:localhost,IP:127.0.0.1";
  // Seconds from now.
  long begins_s = -3600;
  long ends_s = 3600;
};

// A certificate authority of a test.
class TestAuthority {
 public:
  TestAuthority(const TestDirectory& directory, std::string name)
      : directory_(directory), name_(std::move(name)), key_(EVP_EC_gen("P-256")) {
    certificate_ = make(name_, {.names = ""}, key_.get());
    directory_.write(name_ + ".ca", pem(certificate_.get()));
  }

  // Files NAME.crt and NAME.key, of a certificate that this authority has signed.
  CredentialOptions issue(const std::string& file, const Wanted& wanted = {}) {
    const Key key(EVP_EC_gen("P-256"));
    last_ = make(file, wanted, key.get());
    CredentialOptions options;
    options.certificate_file = directory_.write(file + ".crt", pem(last_.get()));
    options.key_file = directory_.write(file + ".key", pem(key.get()));
    options.authority_file = directory_.file(name_ + ".ca");
    return options;
  }
  // A list that revokes the certificate of the last issue().
  std::string revoke_last(bool really = true) {
    const std::unique_ptr<X509_CRL, Free> list(X509_CRL_new());
    X509_CRL_set_version(list.get(), 1);
    X509_CRL_set_issuer_name(list.get(), X509_get_subject_name(certificate_.get()));
    const std::unique_ptr<ASN1_TIME, Free> now(X509_gmtime_adj(nullptr, -60));
    const std::unique_ptr<ASN1_TIME, Free> next(X509_gmtime_adj(nullptr, 3600));
    X509_CRL_set1_lastUpdate(list.get(), now.get());
    X509_CRL_set1_nextUpdate(list.get(), next.get());
    if (really) {
      X509_REVOKED* revoked = X509_REVOKED_new();
      X509_REVOKED_set_serialNumber(revoked, X509_get_serialNumber(last_.get()));
      X509_REVOKED_set_revocationDate(revoked, now.get());
      X509_CRL_add0_revoked(list.get(), revoked);
    }
    X509_CRL_sign(list.get(), key_.get(), EVP_sha256());
    return directory_.write(name_ + ".crl", pem(list.get()));
  }

 private:
  struct Free {
    void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
    void operator()(X509* certificate) const { X509_free(certificate); }
    void operator()(X509_CRL* list) const { X509_CRL_free(list); }
    void operator()(ASN1_TIME* time) const { ASN1_TIME_free(time); }
    void operator()(BIO* bio) const { BIO_free(bio); }
  };
  using Key = std::unique_ptr<EVP_PKEY, Free>;
  using Certificate = std::unique_ptr<X509, Free>;

  static void write_pem(BIO* bio, EVP_PKEY* key) {
    PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr);
  }
  static void write_pem(BIO* bio, X509* certificate) { PEM_write_bio_X509(bio, certificate); }
  static void write_pem(BIO* bio, X509_CRL* list) { PEM_write_bio_X509_CRL(bio, list); }
  template <typename Thing>
  static std::string pem(Thing* thing) {
    const std::unique_ptr<BIO, Free> bio(BIO_new(BIO_s_mem()));
    write_pem(bio.get(), thing);
    char* data = nullptr;
    const long size = BIO_get_mem_data(bio.get(), &data);
    return {data, static_cast<std::size_t>(size)};
  }

  Certificate make(const std::string& subject, const Wanted& wanted, EVP_PKEY* key) {
    Certificate made(X509_new());
    X509_set_version(made.get(), 2);
    ASN1_INTEGER_set(X509_get_serialNumber(made.get()), ++serial_);
    X509_gmtime_adj(X509_getm_notBefore(made.get()), wanted.begins_s);
    X509_gmtime_adj(X509_getm_notAfter(made.get()), wanted.ends_s);
    X509_set_pubkey(made.get(), key);
    X509_NAME_add_entry_by_txt(X509_get_subject_name(made.get()), "CN", MBSTRING_ASC,
                               reinterpret_cast<const unsigned char*>(subject.c_str()), -1, -1, 0);
    X509* const issuer = certificate_ == nullptr ? made.get() : certificate_.get();
    X509_set_issuer_name(made.get(), X509_get_subject_name(issuer));
    add(made.get(), NID_basic_constraints, issuer == made.get() ? "critical,CA:TRUE" : "CA:FALSE");
    if (!wanted.names.empty()) add(made.get(), NID_subject_alt_name, wanted.names.c_str());
    X509_sign(made.get(), key_.get(), EVP_sha256());
    return made;
  }
  static void add(X509* certificate, int kind, const char* value) {
    X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, nullptr, kind, value);
    if (extension == nullptr) throw std::runtime_error("extension");
    X509_add_ext(certificate, extension, -1);
    X509_EXTENSION_free(extension);
  }

  const TestDirectory& directory_;
  std::string name_;
  Key key_;
  Certificate certificate_;
  Certificate last_;
  long serial_ = 0;
};

}  // namespace rekindle::rpc::testing

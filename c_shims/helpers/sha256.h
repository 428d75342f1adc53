/* SHA-256 of a range of a file: FIPS 180-4. */
#ifndef PENROOT_SHA256_H
#define PENROOT_SHA256_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

void sha256(const uint8_t *data, size_t length, char hex[65]);

#endif

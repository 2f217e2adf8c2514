"""Word lists that the generated dialogues draw from, and made-up words for what lists cannot cover."""

import random


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


NAMES = _split(
    """
    Anna Ben Clara David Emma Felix Grace Henry Ida Jack Karen Leo Maria Noah Olivia Peter Quinn Rosa Sam Tina Umar Vera
    Walter Xenia Yusuf Zoe Alice Bob Carol Daniel Eva Frank Greta Hugo Irene James Kate Liam Mia Nora Oscar Paula Ravi
    Sofia Tom Ursula Victor Wendy Yara Amir Bella Carlos Diana Erik Fiona George Hannah Ivan Julia Kevin Laura Martin
    Nina Otto Priya Robert Sarah Theo Uma Vincent Will Yuki Ada Boris Chloe Dora Elias Freya Gustav Helen Isaac Jonas
    Kira Lukas Marta Nadia Omar Petra Ruth Simon Tara Viktor Wanda Alan Linda Mark Susan Paul Mary John Jane Lisa Max
    """
)
SURNAMES = _split(
    """
    Berg Smith Novak Garcia Khan Miller Rossi Tanaka Silva Weber Jones Brown Davis Wilson Moore Taylor Clark Lewis Young
    King Wright Scott Green Baker Adams Nelson Carter Turner Parker Evans Collins Stewart Morris Cook Rogers Reed Bell
    Murphy Bailey Cooper Gray Kelly Howard Ward Brooks Price Wood Barnes Ross Fisher Hunt Stone Lane Fox Cole West
    """
)
CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Iceland": "Reykjavik",
    "Ireland": "Dublin",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Hungary": "Budapest",
    "Greece": "Athens",
    "Turkey": "Ankara",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "Thailand": "Bangkok",
    "Vietnam": "Hanoi",
    "Canada": "Ottawa",
    "Mexico": "Mexico City",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Brazil": "Brasilia",
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "New Zealand": "Wellington",
    "Belgium": "Brussels",
    "the Netherlands": "Amsterdam",
    "Switzerland": "Bern",
    "the Czech Republic": "Prague",
    "Croatia": "Zagreb",
    "Serbia": "Belgrade",
    "Romania": "Bucharest",
    "Bulgaria": "Sofia",
    "Ukraine": "Kyiv",
    "Russia": "Moscow",
    "South Korea": "Seoul",
    "the United Kingdom": "London",
    "the United States": "Washington, D.C.",
    "Morocco": "Rabat",
    "Nigeria": "Abuja",
    "Ethiopia": "Addis Ababa",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Nepal": "Kathmandu",
    "Indonesia": "Jakarta",
    "the Philippines": "Manila",
    "Colombia": "Bogota",
    "Uruguay": "Montevideo",
}
CITIES = _split(
    """
    Oslo Paris Berlin Rome Madrid Lisbon Vienna Prague Athens Dublin London Cairo Tokyo Seoul Lima Boston Chicago Denver
    Dallas Seattle Toronto Montreal Sydney Melbourne Mumbai Delhi Bangkok Hanoi Nairobi Lagos Zurich Geneva Milan Naples
    Turin Porto Seville Valencia Lyon Nice Bordeaux Hamburg Munich Cologne Leipzig Bergen Malmo Turku Tampere Riga
    Vilnius Tallinn Krakow Gdansk Brno Graz Split Sofia Izmir Osaka Kyoto Busan Manila Jakarta Perth Auckland Havana
    Bogota Quito Santiago Austin Houston Miami Atlanta Phoenix Portland
    """
)
ANIMALS = _split(
    """
    cat dog horse cow sheep goat pig duck hen rabbit mouse fox wolf bear lion tiger zebra monkey parrot eagle owl swan
    goose turtle frog snake lizard whale dolphin shark crab spider ant bee camel donkey otter beaver badger panda koala
    kangaroo penguin pigeon raven robin falcon hamster ferret hedgehog squirrel elephant giraffe
    """
)
FRUITS = _split(
    """
    apple pear plum cherry lemon orange banana mango peach grape melon fig kiwi lime apricot strawberry raspberry
    blueberry coconut pineapple papaya tomato carrot potato onion pepper cabbage lettuce spinach pumpkin cucumber radish
    """
)
OBJECTS = _split(
    """
    book pen lamp chair table cup plate spoon knife fork bottle box bag coat hat shoe shirt scarf glove ring watch clock
    phone camera radio piano violin guitar drum kite ball bicycle car boat train wagon ladder hammer saw nail rope
    candle mirror pillow blanket basket bucket broom brush comb key lock door window carpet curtain garden bridge tower
    castle island river mountain forest desert valley meadow planet rocket engine wheel button ticket letter stamp coin
    marble puzzle pencil
    """
)
COLOURS = _split("red blue green yellow black white brown purple orange pink grey silver golden")
JOBS = _split(
    """
    teacher doctor nurse farmer baker pilot lawyer writer painter singer dancer engineer chemist plumber carpenter
    gardener cook waiter driver sailor librarian dentist architect journalist scientist programmer mechanic photographer
    translator electrician
    """
)
DAYS = _split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _split("January February March April May June July August September October November December")
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "up": "down",
    "left": "right",
    "day": "night",
    "old": "new",
    "happy": "sad",
    "open": "closed",
    "full": "empty",
    "hard": "soft",
    "light": "dark",
    "early": "late",
    "high": "low",
    "rich": "poor",
    "strong": "weak",
    "wet": "dry",
    "clean": "dirty",
    "near": "far",
    "long": "short",
    "thick": "thin",
    "loud": "quiet",
    "true": "false",
    "first": "last",
    "inside": "outside",
    "always": "never",
    "begin": "end",
    "buy": "sell",
    "win": "lose",
    "push": "pull",
    "give": "take",
    "wide": "narrow",
}
COMMON = _split(
    """
    able about above accept across action active actor after again agree almost alone along always amount animal answer
    anyone appear around arrive article artist aside attack author autumn average award balance beach beauty become
    before begin behind believe below beneath better between beyond border bottom branch brave bread break breath bright
    bring broken brother build burden business butter calm cancel cannot capital careful cattle cause center century
    certain change chapter charge cheap check cheese child choice circle citizen class clean clear climb close cloud
    coffee collect color column common computer connect consider contain control copper corner correct cotton count
    country couple courage course cousin cover create credit crowd culture current custom daily damage danger daughter
    debate decide deep degree deliver demand depend describe design desire detail develop device differ dinner direct
    discover discuss distance divide doctor dollar double dream dress drink drive during early earth easily east economy
    editor effect effort either empty energy enjoy enough enter entire equal error escape evening event every exact
    example except exist expect explain express extra fabric factor family famous farther father favor feather feature
    feeling fellow fence field fight figure final finger finish flight floor flower follow foreign forget formal former
    forward freedom fresh friend function future garden gather general gentle giant glass global golden grain grand
    grass great ground group growth guard guess guest guide habit handle happen happy harbor hardly health heart heavy
    height hello honest honor hope hotel house human hundred hungry hurry ideal image imagine impact include increase
    indeed indoor inside iron island issue item join journey judge juice jump junior just keep kettle kind kitchen knock
    know labor lake language large later laugh layer leader learn least leather leave legal length lesson letter level
    library light limit linen listen little local logic lonely long lovely lower lucky lunch machine magic major manage
    manner market master matter maybe meadow meal meaning measure medal media medical meet member memory mental metal
    method middle might minor minute mirror modern moment money month moral morning mother motion motor mount mouth move
    museum music mystery narrow nation native nature nearly needle nephew network never night noble noise normal north
    notice novel number object observe obtain ocean offer office often open option order other outer owner oxygen packet
    page paint palace paper parent park partner party passage patient pattern peace people perfect perhaps period person
    phrase picture piece place plain plant plastic pleasure plenty pocket poem point police polite popular position
    possible powder power practice present press pretty price prince print prison private problem process produce profit
    project promise proper protect proud public pupil purpose quality quarter queen question quick quiet quite race rain
    range rapid rather reach read ready real reason receive record reduce region regular remain remember remove repair
    repeat reply report request rescue result return reward rhythm right river road rocket roof room rough round route
    royal rubber sailor salad sample sand scale scene school science screen search season second secret section select
    senior sense series serve settle seven shadow shape share sharp shelter shine short shoulder shower signal silence
    silver simple single sister skill sleep slight slow small smart smile smoke smooth social soldier solid solve sound
    source south space speak special speech speed spirit spoon spring square stable staff stage station steady steam
    steel still stone storm story strange stream street strong student studio study style subject sudden sugar summer
    supply sure surface sweet swim switch symbol system table talent teach temple tender tennis theater theory thing
    think third thought thread throw thunder timber tiny tissue title today toward travel treat trial tribe trouble
    truck trust truth under union unit until upper urban useful usual valley value velvet vessel victory village vision
    visit voice volume voyage wait walk wander warm wash water wealth weather week weight welcome west whether while
    whisper whole wide wild winter wisdom within wonder wooden word worker world worth writer yellow yesterday young
    zero
    """
)
SIGNS = _split(
    "OPEN STOP EXIT PUSH PULL HELLO SALE TAXI HOTEL CAFE YES NO OK HOME BUS NEW FREE RADIO WATER HOUSE TABLE MUSIC GARDEN WINDOW "
    "SUMMER WINTER JAX GPU TRAIN PARK BANK SHOP LEFT RIGHT START END PAUSE PLAY MENU HELP"
)
NOUNS = tuple(dict.fromkeys(ANIMALS + FRUITS + OBJECTS))
"""Things that can be counted, in the singular."""
PLAIN_WORDS = tuple(dict.fromkeys(NOUNS + COMMON + COLOURS + JOBS))
"""Lower-case words for spelling, sorting and reversing."""

_ONSETS = _split("b c d f g h j k l m n p r s t v w z br ch cl cr dr fl fr gl gr pl pr sh sl sn sp st th tr")
_NUCLEI = _split("a e i o u a e i o u ai ea ee ou oa")
_CODAS = ("", "", "", "", "n", "r", "l", "t", "s", "m", "d", "k", "p", "nd", "st", "ng", "ck")


def made_up_word(rng: random.Random) -> str:
    """A pronounceable word of two or three syllables that is (almost surely) in no list."""
    syllables = rng.choice((2, 2, 3))
    word = "".join(rng.choice(_ONSETS) + rng.choice(_NUCLEI) + rng.choice(_CODAS) for _ in range(syllables))
    return word[:9]


def word(rng: random.Random, made_up: float = 0.2) -> str:
    """A lower-case word, made up with probability `made_up`."""
    return made_up_word(rng) if rng.random() < made_up else rng.choice(PLAIN_WORDS)


def first_name(rng: random.Random, made_up: float = 0.15) -> str:
    """A first name."""
    return made_up_word(rng).capitalize() if rng.random() < made_up else rng.choice(NAMES)


def full_name(rng: random.Random) -> str:
    """A first name and a surname."""
    surname = made_up_word(rng).capitalize() if rng.random() < 0.15 else rng.choice(SURNAMES)
    return f"{first_name(rng)} {surname}"


def city(rng: random.Random, made_up: float = 0.1) -> str:
    """A city, now and then one that does not exist."""
    return made_up_word(rng).capitalize() if rng.random() < made_up else rng.choice(CITIES)


def plural(noun: str) -> str:
    """The plural of a word of NOUNS."""
    irregular = {"mouse": "mice", "sheep": "sheep", "goose": "geese", "wolf": "wolves", "knife": "knives", "scarf": "scarves"}
    if noun in irregular:
        return irregular[noun]
    if noun.endswith(("s", "x", "ch", "sh")) or noun in ("tomato", "potato", "mango"):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"
